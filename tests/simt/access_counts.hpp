// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a kernel costs that can be counted: instructions of warps, passes over shared memory, sectors of
// global memory.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvfolia/cuda/context.hpp"

namespace kvfolia_tests::simt {

struct Traffic {
  std::uint64_t requests = 0;  ///< a warp's, together
  std::uint64_t sectors = 0;   ///< of 32 bytes, that they touch
  std::uint64_t distinct = 0;  ///< the same, but each only once a block: what comes from behind a cache
  std::uint64_t bytes = 0;     ///< asked for, each once a request

  /// Sectors over the fewest that as many bytes could lie in.
  double excess() const {
    return bytes == 0 ? 1.0 : static_cast<double>(sectors) * 32.0 / static_cast<double>(bytes);
  }
};

struct Counts {
  std::uint64_t switches = 0;         ///< from thread to thread
  std::uint64_t warp_operations = 0;  ///< those that a warp or a block makes together
  std::uint64_t mma = 0;
  std::uint64_t ldmatrix = 0;
  std::uint64_t bank_conflicts = 0;  ///< passes over shared memory beyond the first of each request
  Traffic reads{};
  Traffic writes{};
};

/// The addresses that the lanes of a warp give one instruction.
struct WarpRequest {
  std::uint32_t lanes = 0;
  std::uint32_t bytes = 0;  ///< of every lane
  std::uint64_t addresses[kvfolia::cuda::warp_size] = {};
};

/// Passes over 32 banks of 4 bytes that a request needs beyond those that its size makes: lanes are served
/// in as many groups as their bytes fill 128.
inline std::uint64_t bank_conflicts(const WarpRequest& request) {
  const std::uint32_t words = std::max(1u, request.bytes / 4);
  const int group = static_cast<int>(32 / words);
  std::uint64_t conflicts = 0;
  for (int first = 0; first < kvfolia::cuda::warp_size; first += group) {
    std::vector<std::uint64_t> banks[32];
    std::size_t passes = 1;
    for (int lane = first; lane < first + group; ++lane) {
      if (!(request.lanes >> lane & 1u)) continue;
      for (std::uint32_t w = 0; w < words; ++w) {
        const std::uint64_t word = request.addresses[lane] / 4 + w;
        auto& bank = banks[word % 32];  // the same word is read for all at once
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        passes = std::max(passes, bank.size());
      }
    }
    conflicts += passes - 1;
  }
  return conflicts;
}

inline void add_request(Traffic& traffic, const WarpRequest& request) {
  std::vector<std::uint64_t> sectors, starts;
  for (int lane = 0; lane < kvfolia::cuda::warp_size; ++lane) {
    if (!(request.lanes >> lane & 1u)) continue;
    starts.push_back(request.addresses[lane]);
    for (std::uint64_t s = request.addresses[lane] / 32;
         s <= (request.addresses[lane] + request.bytes - 1) / 32; ++s)
      sectors.push_back(s);
  }
  const auto distinct = [](std::vector<std::uint64_t>& all) {
    std::sort(all.begin(), all.end());
    return static_cast<std::uint64_t>(std::unique(all.begin(), all.end()) - all.begin());
  };
  ++traffic.requests;
  traffic.sectors += distinct(sectors);
  traffic.bytes += distinct(starts) * request.bytes;
}

/// Puts the accesses of a warp's threads, which come one by one, together: the n-th of each thread behind a
/// barrier, at one place in the code, is one request. Threads that pass a place unequally often between two
/// barriers are put together wrongly.
class WarpRequests {
 public:
  enum class Kind { shared, read, write };

  explicit WarpRequests(int warps) : warps_(static_cast<std::size_t>(warps)) {}

  /// `place` and `kind` name the instruction, `turn` the barriers in front and how often this thread came by.
  void add(Counts& counts, int thread, std::uint64_t place, std::uint32_t turn, Kind kind,
           std::uint64_t address, std::uint32_t bytes) {
    if (kind != Kind::shared)
      for (std::uint64_t s = address / 32; s <= (address + bytes - 1) / 32; ++s)
        (kind == Kind::read ? read_ : written_).insert(s);
    auto& open = warps_[static_cast<std::size_t>(thread / kvfolia::cuda::warp_size)];
    const std::uint64_t key = place << 32 | turn;
    Open& request = open[key];
    const int lane = thread % kvfolia::cuda::warp_size;
    request.kind = kind;
    request.request.lanes |= 1u << lane;
    request.request.bytes = bytes;
    request.request.addresses[lane] = address;
    if (request.request.lanes != ~0u) return;
    count(counts, request);
    open.erase(key);
  }

  /// The block is at its end: what has not come will not come.
  void finish(Counts& counts) {
    for (auto& open : warps_) {
      for (const auto& [key, request] : open) count(counts, request);
      open.clear();
    }
    counts.reads.distinct += read_.size();
    counts.writes.distinct += written_.size();
    read_.clear();
    written_.clear();
  }

 private:
  struct Open {
    Kind kind = Kind::shared;
    WarpRequest request{};
  };
  static void count(Counts& counts, const Open& open) {
    switch (open.kind) {
      case Kind::shared: counts.bank_conflicts += bank_conflicts(open.request); break;
      case Kind::read: add_request(counts.reads, open.request); break;
      case Kind::write: add_request(counts.writes, open.request); break;
    }
  }
  std::vector<std::unordered_map<std::uint64_t, Open>> warps_;
  std::unordered_set<std::uint64_t> read_, written_;  ///< sectors
};

}  // namespace kvfolia_tests::simt
