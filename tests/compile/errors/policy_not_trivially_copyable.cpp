// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: TriviallyCopyable

#include <vector>

#include "kvfolia/kvfolia.hpp"

struct Calibrated : kvfolia::Int8 {
#ifndef MENDED
  std::vector<float> scales;
#endif
};

using Cache = kvfolia::PagedCache<kvfolia::Gqa<64>, Calibrated>;
