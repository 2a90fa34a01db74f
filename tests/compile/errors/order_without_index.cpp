// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasIndex

#include "kvfolia/kvfolia.hpp"

struct Scrambled {
  static constexpr int dim_multiple = 1;
  static constexpr int slot_multiple = 1;
  static constexpr bool strided = false;
#ifdef MENDED
  static constexpr std::int64_t index(int slot, int dim, kvfolia::TileShape shape) {
    return std::int64_t{slot} * shape.dims + dim;
  }
#endif
};

using Layout = kvfolia::Gqa<64, 16, Scrambled>;
