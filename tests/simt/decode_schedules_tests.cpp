// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// That nothing depends on which warp or block runs when: twelve schedules of small ragged batches with every
// kind of pages, fewer of all page sizes and groups, and of long sequences. With KVF_TEST_ALL_SCHEDULES in
// the environment fifty of each page size, too.

#include <cstdlib>
#include <initializer_list>
#include <type_traits>

#include "simt/decode_check.hpp"

using namespace kvfolia_tests;
using simt::check_decode;

namespace {

/// Sanitizers take their time, so only some are checked there: a kind of pages each.
template <class Quant>
inline constexpr bool is_checked_here =
    simt::most_seeds > 3 || std::is_same_v<Quant, Identity<fp16>> || std::is_same_v<Quant, Int4<32>> ||
    is_mixed<Quant> || std::is_same_v<Quant, KeyValue<Centered<Int8>, Int8>>;

template <class Quant>
void check_all_schedules(std::initializer_list<int> page_sizes) {
  using Layout = Gqa<128, dynamic>;
  const bool all = std::getenv("KVF_TEST_ALL_SCHEDULES") != nullptr;
  const int last = *(page_sizes.end() - 1);
  const auto check = [](int group, int page_tokens, int seeds) {
    check_decode<Layout, Quant>(
        {.lengths = {3, 37}, .kv_heads = 1, .group = group, .page_tokens = page_tokens, .seeds = seeds});
  };
  for (const int page_tokens : page_sizes)
    for (const int group : {1, 5, 8, 16}) {
      // Of eight columns and of sixteen.
      const bool chosen = page_tokens == last && (group == 5 || group == 16);
      check(group, page_tokens, all ? 50 : chosen ? 12 : 2);
    }
  for (const int group : {2, 3, 4, 6, 7, 9, 10, 11, 12, 13, 14, 15}) check(group, last, 2);
  if (simt::most_seeds > 3)
    check_decode<Layout, Quant>({.lengths = all ? std::vector<int>{4096, 1000, 2047} : std::vector<int>{1000},
                                 .kv_heads = 1,
                                 .group = 5,
                                 .page_tokens = last,
                                 .seeds = 2});
}
template <class Quant>
void check_schedules() {
  if constexpr (is_checked_here<Quant>) check_all_schedules<Quant>({1, 3, 16, 64});
}
/// Pages hold whole blocks.
template <class Quant>
void check_block_schedules() {
  if constexpr (is_checked_here<Quant>) check_all_schedules<Quant>({32, 64});
}

}  // namespace

TEST_CASE("any schedule of 16-bit pages gives the same bits") {
  check_schedules<Identity<fp16>>();
  check_schedules<Identity<bf16>>();
}
TEST_CASE("any schedule of 8-bit pages gives the same bits") {
  check_schedules<Int8>();
  check_schedules<Int8Groups<32>>();
}
TEST_CASE("any schedule of fp8 pages gives the same bits") {
  check_schedules<Fp8<>>();
  check_schedules<Fp8Tensor<fp8_e5m2>>();
  check_schedules<Fp8Blocks<fp8_e4m3, 64>>();
}
TEST_CASE("any schedule of 4-bit pages gives the same bits") {
  check_schedules<Int4<0>>();
  check_schedules<Int4<32>>();
}
TEST_CASE("any schedule of symmetric 4-bit pages gives the same bits") {
  check_schedules<Int4Symmetric<32>>();
  check_schedules<KeyValue<Int8, Int4<32>>>();
}
TEST_CASE("any schedule of fp4 pages gives the same bits") {
  check_schedules<Nvfp4>();
  check_schedules<Mxfp4>();
}
TEST_CASE("any schedule of pages with parameters a channel gives the same bits") {
  check_block_schedules<Int4Channels<32>>();
  check_block_schedules<KeyValue<Int4Channels<32>, Int4<32>>>();
  check_block_schedules<Compact4Channels<32>>();
}
TEST_CASE("any schedule of centred and rotated pages gives the same bits") {
  check_block_schedules<KeyValue<Centered<Int8>, Int8>>();
  check_schedules<Rotated<Int8>>();
}
TEST_CASE("any schedule of two coded formats gives the same bits") {
  check_schedules<Mixed<Int8, Int4<0>>>();
}
TEST_CASE("any schedule of rows that are made fp16 first gives the same bits") {
  check_schedules<Identity<float>>();
  check_schedules<Q8_0>();
  check_schedules<Q4_0>();
}
