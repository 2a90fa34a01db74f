// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Pages of many layouts and quantizers behind one interface, so that tests of the fast path are compiled
// once; and rows over such pages, put together in any company.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/kvfolia.hpp"
#include "kvfolia/ref/attend.hpp"
#include "support/random.hpp"

namespace kvfolia_tests {

/// One executor for all orders, as each type of them compiles every kernel anew.
struct AnyOrder {
  int threads = 1;
  bool backwards = false;
  int concurrency() const { return threads; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    if (threads == 1)
      for (std::int64_t i = 0; i < n; ++i) f(backwards ? n - 1 - i : i, 0);
    if (threads == 1) return;
    std::vector<std::thread> workers;
    for (int w = 0; w < threads; ++w)
      workers.emplace_back([&, w] {
        for (std::int64_t i = w; i < n; i += threads) f(i, w);
      });
    for (std::thread& worker : workers) worker.join();
  }
};

struct PoolSpec {
  int kv_heads = 2;
  int page_tokens = 16;
  int pages = 0;              ///< of each format
  bool heads_inside = false;  ///< [page][slot][head][dim], where the orders can be strided
};

/// Pages in buffers that end with the last one's last byte. Bytes that nothing was written to are 0xff.
class Pool {
 public:
  virtual ~Pool() = default;

  PoolSpec spec{};
  int key_dim = 0, value_dim = 0;
  bool shares = false;         ///< the value is a part of the key
  int formats = 1, exact = 0;  ///< how many there are, and which is the exact one
  int seal_tokens = 1;         ///< of the coded formats
  bool rounds_few = false;     ///< operands, in rows with up to four queries
  bool rounds_many = false;    ///< in others

  /// Encodes `used` slots of a page, all of them where codes need blocks: [slot][head][dim].
  virtual void write(int format, int page, const float* keys, const float* values, int used) = 0;
  virtual kvfolia::Result<kvfolia::ref::Attention> ref(const kvfolia::BatchView& batch,
                                                       const kvfolia::AttendArgs& args, int heads,
                                                       kvfolia::Window window) const = 0;
  /// Plans and attends; gives what is wrong, or nothing.
  virtual std::string attend(const kvfolia::BatchView& batch, const kvfolia::AttendArgs& args, int heads,
                             kvfolia::Window window, bool plain, const AnyOrder& order) const = 0;
};

struct PoolKind {
  const char* name;
  std::vector<int> pages;  ///< sizes that it can have
  std::function<std::unique_ptr<Pool>(const PoolSpec&)> make;
};
/// Each built for the instruction set of the machine that compiled it.
const std::vector<PoolKind>& pool_kinds();
const PoolKind& pool_kind(const char* name);

}  // namespace kvfolia_tests
