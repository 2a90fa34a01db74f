// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasTokenScale

#include "kvfolia/kvfolia.hpp"

struct Codes : kvfolia::Identity<float> {
  static constexpr kvfolia::Affine affine{.token_scale = true};
#ifdef MENDED
  template <class Tile>
  float token_scale(Tile, int, int) const {
    return 1.0f;
  }
#endif
};

using Cache = kvfolia::PagedCache<kvfolia::Gqa<64>, Codes>;
