// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Faults that attention kernels have shipped with, each with the right value, in the kernels for GPUs. One KV
// head, head dim 64, scale 1 and zero keys unless stated.

#include <sys/mman.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "simt/decode_scenario.hpp"
#include "support/hand.hpp"

using namespace kvfolia_tests;

namespace {

/// Runs the kernels over pages filled in by hand.
template <int Dim, class T>
void attend(Hand<Dim, T>& hand, AttendArgs args = {}, int split_tokens = cuda::default_split_tokens) {
  args = hand.prepare(args);
  auto config = simt::config_of(hand.batch(), hand.view.page_tokens, hand.heads);
  config.split_tokens = split_tokens;
  const auto plan = cuda::plan_attend(hand.view, config);
  REQUIRE(plan);
  simt::attend(hand.view, hand.batch(), args, *plan, 1);
}

/// What 16-bit operands leave of results of magnitude 1.
constexpr double margin = 1e-3;

}  // namespace

TEST_CASE("kernels read a page beyond 2^32 bytes where it lies") {
  // Address space only: the pages that are touched take memory.
  const std::size_t bytes = std::size_t{262145} * 16384;
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* base = static_cast<std::byte*>(memory);
  for (const std::int32_t page : {131072, 262144}) {
    Hand<64, fp16> hand(32, 1);
    hand.view.formats[0] = {{base, 16384, 0, 128}, {base + 8192, 16384, 0, 128}, {}, {}, 262145};
    hand.row(1, {page}, 1);
    for (std::int64_t d = 0; d < 64; ++d)
      reinterpret_cast<fp16*>(base + page * std::int64_t{16384} + 8192)[d] = fp16(2.5f);
    attend(hand);
    hand.check(0, 2.5f, margin);
  }
  ::munmap(memory, bytes);
}

TEST_CASE("slots that nobody filled reach no result of a kernel") {
  Hand<64, fp16> hand(4, 1);
  hand.row(1, {0}, 1);
  hand.store(0, 0, 0.0f, 2.5f);
  attend(hand);
  hand.check(0, 2.5f);
  CHECK(hand.lse[0].value == 0.0f);
}

TEST_CASE("kernels take lengths 0 and 1 in one batch") {
  const float sink = 1.25f;
  for (const bool with_sink : {false, true}) {
    Hand<64, fp16> hand(4, 1);
    hand.row(1, {}, 0);
    hand.row(1, {0}, 1);
    hand.store(0, 0, 0.0f, 3.0f);
    AttendArgs args;
    args.sink_logits = with_sink ? &sink : nullptr;
    attend(hand, args);
    hand.check(0, 0.0f, 0.0);
    hand.check(1, with_sink ? 3.0f / (1.0f + std::exp(sink)) : 3.0f, 3 * margin);
    if (with_sink)
      CHECK(hand.lse[0].value == Approx(sink));
    else
      CHECK(hand.lse[0].value == -INFINITY);
  }
}

TEST_CASE("partial results of kernels merge by natural logarithms") {
  Hand<64, fp16> prefix(8, 1), suffix(1, 1);
  prefix.row(1, {0}, 8);
  for (int slot = 0; slot < 8; ++slot) prefix.store(0, slot, 0.0f, 0.0f);
  suffix.row(1, {0}, 1);
  suffix.store(0, 0, 0.0f, 1.0f);
  AttendArgs partial;
  partial.partial = true;
  attend(prefix, partial);
  attend(suffix, partial);
  CHECK(prefix.lse[0].value == Approx(2.0794415f));
  MergeArgs merge{.tokens = 1, .query_heads = 1, .value_dim = 64};
  merge.out = {prefix.out.data(), 64, 64};
  merge.lse = {prefix.lse.data(), 1, 1};
  merge.other_out = {suffix.out.data(), 64, 64};
  merge.other_lse = {suffix.lse.data(), 1, 1};
  REQUIRE(cpu::merge(merge, cpu::serial));
  prefix.check(0, 1.0f / 9.0f, margin);
}

TEST_CASE("kernels give query heads of any group size their own weights") {
  for (const int group : {3, 5, 6, 7, 12, 16}) {
    CAPTURE(group);
    Hand<64, fp16> hand(2, 1);
    hand.heads = group;
    hand.row(1, {0}, 2);
    hand.store(0, 0, 1.0f, 1.0f);
    hand.store(0, 1, 0.0f, 0.0f);
    hand.queries.assign(static_cast<std::size_t>(group * 64), 0.0f);
    for (int i = 0; i < group; ++i) hand.queries[static_cast<std::size_t>(i * 64)] = static_cast<float>(i);
    attend(hand);
    for (int i = 0; i < group; ++i)
      hand.check(static_cast<std::size_t>(i), 1.0f / (1.0f + std::exp(static_cast<float>(-i))), margin);
  }
}

TEMPLATE_TEST_CASE_SIG("kernels are exact with unusual head dims, and write every element", "",
                       ((int Dim), Dim), 80, 96, 112, 192, 256) {
  Hand<Dim, fp16> hand(4, 2);
  hand.row(2, {0, 1}, 5);
  for (int i = 0; i < 5; ++i) hand.store(i / 4, i % 4, static_cast<float>(i), static_cast<float>(i));
  attend(hand);
  hand.check(0, 1.5f, 2 * margin);  // positions 0..3
  hand.check(1, 2.0f, 2 * margin);
}

TEMPLATE_TEST_CASE_SIG("head dims that kernels do not have are refused", "", ((int Dim), Dim), 40, 72, 576) {
  Hand<Dim, fp16> hand(4, 1);
  static_assert(!cuda::supported<Gqa<Dim, dynamic>, Identity<fp16>>(1, 1));
  hand.row(1, {0}, 1);
  const auto plan = cuda::plan_attend(hand.view, simt::config_of(hand.batch(), 4, 1));
  REQUIRE_FALSE(plan);
  CHECK(plan.error().code == Errc::unsupported);
}

TEST_CASE("kernels give the same numbers however splits lie, every row written") {
  Hand<64, fp16> hand(16, 80);
  std::vector<int> first, second;
  for (int i = 0; i < 40; ++i) first.push_back(i), second.push_back(79 - i);
  hand.row(3, first, 40 * 16 - 5);
  hand.row(1, {40, 41}, 20);
  hand.row(2, second, 600 + 33);
  Random random(8);
  for (fp16& x : hand.keys) x = fp16(random.gauss());
  for (fp16& x : hand.values) x = fp16(random.gauss());
  hand.queries = random.gauss(6 * 64);
  attend(hand, {}, 128);
  const std::vector<float> many = hand.out;
  attend(hand, {}, 1024);
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < many.size(); ++i) {
    REQUIRE((std::isfinite(many[i]) && std::isfinite(hand.out[i])));
    difference += std::pow(many[i] - hand.out[i], 2);
    size += std::pow(many[i], 2);
  }
  CHECK(std::sqrt(difference / size) <= fp16_tolerance);
}

TEST_CASE("partial results are as wide as float") {
  // Means of splits are 1 + 2^-8 and 1 + 2^-7: bf16 has the first one as 1, and the mean of all as 1 + 2^-7.
  Hand<64, bf16> hand(16, 16);
  std::vector<int> pages;
  for (int page = 0; page < 16; ++page) {
    pages.push_back(page);
    for (int slot = 0; slot < 16; ++slot) hand.store(page, slot, 0.0f, page < 4 ? 1.0f : 1.0078125f);
  }
  hand.row(1, pages, 256);
  AttendArgs args = hand.prepare();
  std::vector<bf16> out(64);
  args.out = {out.data(), 64, 64};
  auto config = simt::config_of(hand.batch(), 16, 1);
  config.split_tokens = 128;
  const auto plan = cuda::plan_attend(hand.view, config);
  REQUIRE(plan);
  CHECK(plan->splits == 2);
  simt::attend(hand.view, hand.batch(), args, *plan, 1);
  for (const bf16 x : out) CHECK(static_cast<float>(x) == 1.0078125f);
}

TEST_CASE("kernels read pages in the table's order: the mean of logical page numbers") {
  for (const int page : {1, 3, 16, 19, 64, 128, 256, 512}) {
    CAPTURE(page);
    constexpr int pages = 5;
    Hand<64, fp16> hand(page, 16);
    const std::vector<int> table = {11, 2, 7, 0, 13};
    hand.row(1, table, pages * page);
    for (int i = 0; i < pages; ++i)
      for (int slot = 0; slot < page; ++slot)
        hand.store(table[static_cast<std::size_t>(i)], slot, 0.0f, static_cast<float>(i));
    attend(hand);
    hand.check(0, 2.0f, 2 * margin);
    CHECK(hand.lse[0].value == Approx(std::log(static_cast<float>(pages * page))).margin(margin));
  }
}

TEST_CASE("a last page's length leads no kernel beyond the table") {
  // Hosts refuse what they can read; on a device it is cut to the table.
  for (const std::int32_t last : {0, 4, 5, 100}) {
    CAPTURE(last);
    Hand<64, fp16> hand(4, 2);
    hand.row(1, {0, 1}, 8);
    for (int i = 0; i < 8; ++i) hand.store(i / 4, i % 4, 0.0f, i < 4 ? 1.0f : 2.0f);
    BatchView batch = hand.batch();
    batch.lengths = nullptr;
    batch.last_page_tokens = &last;
    CHECK(validate(hand.view, batch).has_value() == (last == 4));
    const AttendArgs args = hand.prepare();
    const auto plan = cuda::plan_attend(hand.view, simt::config_of(hand.batch(), 4, 1));
    REQUIRE(plan);
    simt::attend(hand.view, batch, args, *plan, 1);
    hand.check(0, last == 0 ? 1.0f : 1.5f, 2 * margin);
  }
}

TEST_CASE("errors of plans cross no boundary as exceptions and do not vanish in release builds") {
  using View = PagedView<Gqa<64>, Int8>;
  static_assert(noexcept(cuda::plan_attend(View{}, cuda::AttendConfig{})));
  static_assert(std::is_trivially_copyable_v<cuda::AttendPlan>);
  Hand<64, fp16> hand(4, 1);
  hand.row(1, {0}, 4);
  const auto fine = simt::config_of(hand.batch(), 4, 1);
  const auto subject = [&](auto change) {
    auto config = fine;
    change(config);
    const auto plan = cuda::plan_attend(hand.view, config);
    REQUIRE_FALSE(plan);
    return std::string(plan.error().subject);
  };
  using Config = cuda::AttendConfig;
  CHECK(subject([](Config& c) { c.rows = -1; }) == "config.rows");
  CHECK(subject([](Config& c) { c.queries = -1; }) == "config.queries");
  CHECK(subject([](Config& c) { c.row_queries = 0; }) == "config.row_queries");
  CHECK(subject([](Config& c) { c.row_slots = -1; }) == "config.row_slots");
  CHECK(subject([](Config& c) { c.split_tokens = 100; }) == "config.split_tokens");
  CHECK(subject([](Config& c) { c.rows = 70000; }) == "config.rows");

  const auto plan = cuda::plan_attend(hand.view, fine);
  REQUIRE(plan);
  const AttendArgs args = hand.prepare();
  const auto refused = [&](auto view, AttendArgs given, std::size_t bytes) {
    const auto ok = cuda::detail::check_attend(view, hand.batch(), given, *plan, bytes);
    REQUIRE_FALSE(ok);
    return std::string(ok.error().subject);
  };
  const std::size_t bytes = plan->workspace_bytes();
  CHECK(refused(hand.view, args, bytes - 1) == "workspace");
  auto view = hand.view;
  view.formats[0].keys.page_stride = std::int64_t{1} << 32;
  CHECK(refused(view, args, bytes) == "view.formats (strides of 4 GiB)");
  view = hand.view;
  view.formats[0].values.base += 8;
  CHECK(refused(view, args, bytes) == "view.formats.values (alignment)");
  PagedView<Gqa<64, dynamic>, Mixed<Identity<fp16>, Int8>> mixed{};
  mixed.page_tokens = 4;
  CHECK(refused(mixed, args, bytes) == "plan (made for another view)");
  AttendArgs without = args;
  without.out.data = nullptr;
  CHECK(refused(hand.view, without, bytes) == "args.out");
}
