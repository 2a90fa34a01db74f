// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What kernels take of a GPU, as data: which compute capabilities differ, and in what.

#include <cstdint>
#include <initializer_list>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Shared memory of compute capabilities, in bytes.
/// Source: CUDA C++ Programming Guide 13.0, technical specifications per compute capability.
struct Tuning {
  std::uint32_t multiprocessor_bytes;
  std::uint32_t block_bytes;  ///< that one block can have
};

/// The compute capability, 10 * major + minor, whose tuning another one has: one of 80, 86, 89, 90, 100.
constexpr int tuned_capability(int capability) {
  if (capability < 86 || capability == 87) return 80;
  if (capability < 89) return 86;
  if (capability < 90 || capability >= 120) return 89;
  return capability < 100 ? 90 : 100;
}
constexpr Tuning tuning(int capability) {
  switch (tuned_capability(capability)) {
    case 80: return {164u << 10, 163u << 10};
    case 86:
    case 89: return {100u << 10, 99u << 10};
    default: return {228u << 10, 227u << 10};
  }
}

namespace detail {

/// Warps of a block, and the tiles that each of them has in its ring: one that it computes with, others on
/// their way.
struct Pipeline {
  int warps;
  int stages;
};

/// The first of these that fits, two blocks a multiprocessor if that leaves each warp a tile in flight:
/// `stage` bytes a tile, `warp` bytes a warp, `rest` bytes a block, and 1 KiB that the system takes of each.
constexpr Pipeline pipeline(Tuning tuning, std::uint32_t stage, std::uint32_t warp, std::uint32_t rest) {
  struct Choice {
    std::uint32_t blocks, warps, stages;
  };
  for (const Choice c :
       {Choice{2, 4, 3}, Choice{2, 4, 2}, Choice{1, 4, 3}, Choice{1, 4, 2}, Choice{1, 2, 2}}) {
    const std::uint32_t block = c.warps * (c.stages * stage + warp) + rest;
    if (block <= tuning.block_bytes && c.blocks * (block + 1024) <= tuning.multiprocessor_bytes)
      return {static_cast<int>(c.warps), static_cast<int>(c.stages)};
  }
  return {1, 2};
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI::cuda
