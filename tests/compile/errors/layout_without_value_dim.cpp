// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasValueDim

#include "kvfolia/kvfolia.hpp"

struct Vectors {
  static constexpr int key_dim = 64;
  static constexpr int page_tokens = 16;
  static constexpr bool shares_key_value = false;
  using KeyOrder = kvfolia::SlotMajor;
  using ValueOrder = kvfolia::SlotMajor;
#ifdef MENDED
  static constexpr int value_dim = 64;
#endif
};

using Cache = kvfolia::PagedCache<Vectors, kvfolia::Int8>;
