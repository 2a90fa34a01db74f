// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasSealTokens

#include "kvfolia/kvfolia.hpp"

struct Codes : kvfolia::Int8 {
#ifndef MENDED
 private:
  using kvfolia::Int8::seal_tokens;
#endif
};

using View = kvfolia::PagedView<kvfolia::Gqa<64>, Codes>;
