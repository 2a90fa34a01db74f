// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Caches of 8-bit integers, also with 4-bit values.

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

constexpr std::tuple quantizers{
    Named<Int8Groups<32>>{"int8-g32"},
    Named<KeyValue<Centered<Int8>, Int8>>{"int8+centered"},
    Named<KeyValue<Rotated<Int8>, Int8>>{"int8+rotated"},
    Named<KeyValue<Rotated<Centered<Int8>>, Int8>>{"int8+centered+rotated"},
    Named<KeyValue<Int8, Int4<32>>>{"int8/int4-g32"},
    Named<KeyValue<Centered<Int8>, Rotated<Int4<32>>>>{"int8+centered/int4-g32+rotated"},
    Named<Mixed<Int8, KeyValue<Int4Channels<32>, Int4<32>>>>{"int8+mixed:PERCENT"},
    Named<Q8_0>{"q8_0"}};

}  // namespace

Family int8_family() { return family_of<quantizers>(); }

}  // namespace kvfolia_examples
