// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: rotate what is centred: Rotated<Centered<Q>>

#include "kvfolia/kvfolia.hpp"

using namespace kvfolia;

#ifdef MENDED
using Quant = Rotated<Centered<Int8>>;
#else
using Quant = Centered<Rotated<Int8>>;
#endif

constexpr int tokens = Quant::seal_tokens;
