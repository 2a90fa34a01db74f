// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: HeadDim must be a multiple

#include "kvfolia/kvfolia.hpp"

#ifdef MENDED
constexpr int head_dim = 64;
#else
constexpr int head_dim = 66;
#endif

constexpr int dim = kvfolia::Gqa<head_dim, 16, kvfolia::DimMajor<4>>::key_dim;
