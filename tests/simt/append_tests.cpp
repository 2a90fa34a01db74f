// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels write the bytes that the CPU writes: every quantizer, page sizes, however tokens arrive.

#include <initializer_list>

#include "simt/append_scenario.hpp"

using namespace kvfolia_tests;
using simt::check_same_bytes;

namespace {

using Layout = Gqa<64, dynamic>;

template <class Quant>
void check_pages(std::initializer_list<int> page_sizes, const Quant& quant = {}) {
  for (const int page_tokens : page_sizes) {
    check_same_bytes<Layout, Quant>(page_tokens, 0, quant);
    if (exact_format<Quant> != coded_format) check_same_bytes<Layout, Quant>(page_tokens, 1, quant);
  }
}

}  // namespace

TEST_CASE("kernels write the CPU's bytes: floats") {
  check_pages<Identity<float>>({1, 3, 16});
  check_pages<Identity<fp16>>({1, 3, 16});
  check_pages<Identity<bf16>>({16});
}
TEST_CASE("kernels write the CPU's bytes: 8-bit integers") {
  check_pages<Int8>({1, 3, 16, 64});
  check_pages<Int8Groups<32>>({16});
}
TEST_CASE("kernels write the CPU's bytes: 4-bit integers") {
  check_pages<Int4<0>>({3, 16});
  check_pages<Int4<32>>({16});
  check_pages<Int4Symmetric<32>>({3});
}
TEST_CASE("kernels write the CPU's bytes: fp8") {
  check_pages<Fp8<>>({3, 16});
  check_pages({16}, Fp8Tensor<fp8_e5m2>::calibrated(3.0f));
  check_pages<Fp8Blocks<fp8_e4m3, 32>>({16});
}
TEST_CASE("kernels write the CPU's bytes: fp4") {
  check_pages({3, 16}, Nvfp4::calibrated(5.0f));
  check_pages<Mxfp4>({16});
}
TEST_CASE("kernels write the CPU's bytes: ggml's blocks") {
  check_pages<Q8_0>({3, 16});
  check_pages<Q4_0>({16});
}
TEST_CASE("kernels write the CPU's bytes: channels of blocks") {
  check_pages<KeyValue<Int4Channels<16>, Int4<32>>>({16, 32});
  check_pages<Compact4Channels<16>>({16, 32});
  check_pages<KeyValue<Centered<Int8, 16>, Int8>>({16, 48});
  check_pages<KeyValue<Centered<Int4<32>, 32>, Centered<Nvfp4, 16>>>({32});
}
TEST_CASE("kernels write the CPU's bytes: rotated") {
  check_pages<Rotated<Int8>>({3, 16});
  check_pages<Rotated<Centered<Int4<32>, 16>>>({16, 32});
  check_pages<Rotated<Compact4Channels<32>>>({32});
  check_pages<KeyValue<Rotated<Int8, 8>, Identity<fp16>>>({16});
}
TEST_CASE("kernels write the CPU's bytes: two coded formats") {
  check_pages<Mixed<Int8, KeyValue<Int4Channels<16>, Int4<0>>>>({16, 32});
  check_pages<Mixed<Rotated<Int8>, Rotated<Int4<0>>>>({3, 16});
  check_pages<Mixed<Centered<Int8, 16>, Compact4Channels<16>>>({16});
}
