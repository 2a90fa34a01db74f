// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: the quantizer of keys cannot code so many dims

#include "kvfolia/kvfolia.hpp"

#ifdef MENDED
constexpr int head_dim = 96;
#else
constexpr int head_dim = 80;
#endif

constexpr auto bytes =
    kvfolia::page_format<kvfolia::Gqa<head_dim>, kvfolia::KeyValue<kvfolia::Q8_0, kvfolia::Int8>>(1, 32)
        .slice_bytes();
