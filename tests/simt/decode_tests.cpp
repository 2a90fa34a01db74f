// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What codes there are, and how they may lie.

#include "simt/decode_check.hpp"

using namespace kvfolia_tests;
using simt::check_decode;

// Lengths around parts of 16 tokens, tiles of a warp and of a block, and splits.

TEST_CASE("decode of fp16 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Identity<fp16>>({.lengths = {1, 2, 15, 16, 17, 63, 64, 65, 200, 513}});
}
TEST_CASE("decode of bf16 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Identity<bf16>>({.lengths = {1, 16, 17, 129, 520}});
}
TEST_CASE("decode of Int8 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int8>({.lengths = {1, 2, 15, 16, 17, 63, 64, 65, 200, 513}});
}
TEST_CASE("decode of 4-bit codes agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int4<0>>({.lengths = {1, 2, 31, 32, 33, 127, 128, 129, 600}});
  check_decode<Gqa<128, dynamic>, Int4Symmetric<0>>({.lengths = {1, 33, 65, 600}});
}
TEST_CASE("decode of fp8 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Fp8<>>({.lengths = {1, 2, 15, 16, 17, 40, 200}});
  check_decode<Gqa<128, dynamic>, Fp8<fp8_e5m2>>({.lengths = {1, 33}});
}
TEST_CASE("decode of keys and values that are coded differently agrees with ref") {
  check_decode<Gqa<128, dynamic>, KeyValue<Int8, Int4<0>>>({.lengths = {1, 31, 32, 33, 600}});
}

TEST_CASE("decode of codes with a scale a group agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int4<32>>({.lengths = {1, 31, 32, 33, 600}});
  check_decode<Gqa<128, dynamic>, Int8Groups<32>>({.lengths = {1, 15, 16, 17, 200}, .page_tokens = 3});
  check_decode<Gqa<128, dynamic>, Mxfp4>({.lengths = {1, 33, 65}});
  check_decode<Gqa<64, dynamic>, KeyValue<Int8Groups<32>, Int4<32>>>(
      {.lengths = {1, 33, 65}, .exact_sink_pages = 1});
}
