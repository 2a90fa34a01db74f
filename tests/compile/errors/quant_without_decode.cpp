// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasDecode

#include "kvfolia/kvfolia.hpp"

struct Codes {
  using Exact = kvfolia::Identity<float>;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;
  static constexpr int group_dims = 0;
  static constexpr kvfolia::Affine affine{};
  static constexpr std::int64_t param_bytes(int, int) { return 0; }
  template <class Tile, class Values>
  void encode(Tile, int, int, Values) const {}
  template <class Tile>
  void codes(Tile, int, float*) const {}
#ifdef MENDED
  template <class Tile>
  void decode(Tile, int, float*) const {}
#endif
};

using Cache = kvfolia::PagedCache<kvfolia::Gqa<64>, Codes>;
