// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HasVisible

#include "kvfolia/kvfolia.hpp"

struct Whim {
#ifdef MENDED
  kvfolia::Window visible() const { return {}; }
#endif
};

using Cache = kvfolia::PagedCache<kvfolia::Gqa<64>, kvfolia::Int8, Whim>;
