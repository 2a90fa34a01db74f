// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Caches of 4-bit integers.

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

constexpr std::tuple quantizers{
    Named<Int4<32>>{"int4-g32"},
    Named<Int4<64>>{"int4-g64"},
    Named<KeyValue<Rotated<Centered<Int4<32>>>, Int4<32>>>{"int4-g32+centered+rotated"},
    Named<KeyValue<Rotated<Centered<Int4<32>>>, Rotated<Int4<32>>>>{
        "int4-g32+centered+rotated/int4-g32+rotated"},
    Named<KeyValue<Rotated<Centered<Int4<64>>>, Rotated<Int4<64>>>>{
        "int4-g64+centered+rotated/int4-g64+rotated"},
    Named<KeyValue<Int4Channels<32>, Int4<32>>>{"kivi4"},
    Named<KeyValue<Int4Channels<64>, Int4<64>>>{"kivi4-g64"},
    Named<KeyValue<Int4Channels<64>, Rotated<Int4<64>>>>{"kivi4-g64/int4-g64+rotated"},
    Named<Rotated<Compact4Channels<32>>>{"compact4+rotated/compact4+rotated"},
    Named<Rotated<Compact4Channels<16>>>{"compact4-g16+rotated/compact4-g16+rotated"},
    Named<Rotated<Compact4Channels<64>>>{"compact4-g64+rotated/compact4-g64+rotated"},
    Named<KeyValue<Rotated<Compact4Channels<16>>, Rotated<Compact4Channels<32>>>>{
        "compact4-g16+rotated/compact4+rotated"},
    Named<KeyValue<Centered<Int8>, Rotated<Compact4Channels<32>>>>{"int8+centered/compact4+rotated"},
    Named<Q4_0>{"q4_0"}};

}  // namespace

Family int4_family() { return family_of<quantizers>(); }

}  // namespace kvfolia_examples
