// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Which cases are measured, and which layouts and quantizers in them.

#include <string>
#include <type_traits>
#include <vector>

#include "attend_pages.hpp"

namespace kvfolia_bench {

using Cases = std::vector<AttendCase>;

inline Cases operator+(Cases a, const Cases& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// One query over caches from short to long.
inline Cases decode_cases() {
  return {{.keys = 512},
          {.keys = 4096},
          {.keys = 16384},
          {.keys = 65536},
          {.keys = 4096, .threads = 2},
          {.keys = 65536, .threads = 2}};
}
/// Many queries at the end of a text.
inline Cases prefill_cases() {
  return {{.keys = 4096, .queries = 512}, {.keys = 4096, .queries = 512, .threads = 2}};
}
/// Query heads that share a KV head: 8, 1, 3, 7.
inline Cases head_cases() {
  return {{.keys = 16384, .query_heads = 64},
          {.keys = 16384, .query_heads = 8},
          {.keys = 16384, .query_heads = 24},
          {.keys = 16384, .query_heads = 56}};
}
inline Cases batch_cases() {
  return {{.batch = 4}, {.batch = 16}, {.batch = 16, .threads = 2}, {.keys = 512, .batch = 16}};
}
inline Cases page_cases() {
  return {{.keys = 16384, .page_tokens = 16},
          {.keys = 16384, .page_tokens = 16, .shuffled = true},
          {.keys = 16384, .page_tokens = 64, .shuffled = true}};
}
/// A short one, long ones, a wide one.
inline Cases few_cases() {
  return {{.keys = 4096},
          {.keys = 65536},
          {.keys = 65536, .threads = 2},
          {.keys = 4096, .queries = 512, .threads = 2}};
}
inline Cases all_cases() {
  return decode_cases() + prefill_cases() + head_cases() + batch_cases() + page_cases();
}

template <class Order>
inline const char* const order_name = "slots";
template <int X>
inline const std::string order_name<kvfolia::DimMajor<X>> = "dims" + std::to_string(X);
template <int X>
inline const std::string order_name<kvfolia::SlotPairs<X>> = "slots" + std::to_string(X);

/// One quantizer, head dim and order of the keys; values lie slot by slot, if nothing else is said.
template <class Quant, int Dims = 128, class KeyOrder = kvfolia::SlotMajor,
          class ValueOrder = kvfolia::SlotMajor>
void add_cases(Bench& bench, const std::string& quantizer, const Cases& cases) {
  using Layout = kvfolia::Gqa<Dims, kvfolia::dynamic, KeyOrder, ValueOrder>;
  constexpr double allowed = 0.01;
  for (const AttendCase& c : cases) {
    if (c.page_tokens % Quant::seal_tokens != 0) continue;
    const std::string name =
        "attend/" + quantizer + c.name(Dims) + "/pages:" + std::to_string(c.page_tokens) +
        (c.shuffled ? "/shuffled/" : "/contiguous/") + order_name<KeyOrder> +
        (std::is_same_v<ValueOrder, kvfolia::SlotMajor> ? std::string()
                                                        : "+" + std::string(order_name<ValueOrder>));
    bench.add(name, c, Dims, allowed, [c](HugeMemory& memory, std::int64_t cold_bytes) {
      auto made = std::make_unique<PagesAttention<Layout, Quant>>(c, memory, cold_bytes);
      return made->prepare() ? std::unique_ptr<Attention>(std::move(made)) : nullptr;
    });
  }
}

}  // namespace kvfolia_bench
