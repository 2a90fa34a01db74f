// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: the larger block must hold whole smaller ones

#include "kvfolia/kvfolia.hpp"

#ifdef MENDED
constexpr int tokens = 64;
#else
constexpr int tokens = 48;
#endif

constexpr int blocks =
    kvfolia::KeyValue<kvfolia::Int4Channels<32>, kvfolia::Int4Channels<tokens>>::seal_tokens;
