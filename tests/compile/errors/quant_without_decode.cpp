// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasDecode

#include "kvfolia/kvfolia.hpp"

struct Codes {
  using Exact = kvfolia::Identity<float>;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;
  static constexpr auto key_axis = kvfolia::Axis::token;
  static constexpr auto value_axis = kvfolia::Axis::token;
  static constexpr std::int64_t param_bytes(int, int) { return 0; }
  template <class Tile>
  void encode(const Tile&, int, int, const float*) const {}
#ifdef MENDED
  template <class Tile>
  void decode(const Tile&, int, float*) const {}
#endif
};

using Cache = kvfolia::PagedCache<kvfolia::Gqa<64>, Codes>;
