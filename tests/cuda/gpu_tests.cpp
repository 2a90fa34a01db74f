// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The cases that the kernels' bodies pass on the host, launched on a GPU. Ends with 77 where there is none.

#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include <cstdio>

#include "cuda/gpu_append.hpp"
#include "cuda/gpu_pages.hpp"
#include "simt/decode_check.hpp"
#include "simt/page_scenario.hpp"

using namespace kvfolia_tests;

namespace {

void require(const Result<>& ok) {
  INFO((ok ? "" : ok.error().subject));
  REQUIRE(ok);
}

/// Every launch must give the same bits; those of a captured graph, too.
template <class Quant>
void check_decode(const simt::DecodeSetup& setup) {
  simt::check_decode_by<gpu::Layout, Quant>(
      setup, [](const auto& view, const BatchView& batch, const AttendArgs& args,
                const cuda::AttendPlan& plan, std::uint64_t seed) {
        require(gpu::attend<Quant>({view, batch, args, plan.config.query_heads}, plan, seed % 2 == 1));
      });
}

template <class Quant>
void check_pages() {
  const int block = kvfolia::detail::largest_block<Quant>;
  for (const int page_tokens : {1, 3, 16, 64}) {
    if (page_tokens % block != 0) continue;
    for (const int group : {1, 5, 8, 16})
      check_decode<Quant>({.lengths = {1, 17, 33, 64, 65, 513, 4096},
                           .group = group,
                           .page_tokens = page_tokens,
                           .seeds = 4,
                           .exact_sink_pages = exact_format<Quant> == coded_format ? 0 : 1});
  }
}

/// Writes the second of two caches.
struct Writer {
  template <class Cache>
  static void append(Cache& cache, LayerId layer, const Batch& batch, const AppendArgs& args, std::uint64_t) {
    require(gpu::append<typename Cache::Quant>(cache.view(layer), batch, args, batch.tokens(),
                                               simt::page_arrays(cache)));
  }
};

/// Runs operations on pages.
struct Runner {
  static constexpr bool counts = false;

  template <cuda::PageMove Move>
  static simt::Counts move(const cuda::detail::MoveArgs& args, const Arrays& arrays) {
    require(gpu::move(Move, args, arrays));
    return {};
  }
  template <class Layout, class Quant>
  static simt::Counts compact(const PagedView<Layout, Quant>& view, const BatchView& batch,
                              const cuda::CompactArgs& args, const Arrays& arrays) {
    require(gpu::compact(view, batch, args, arrays));
    return {};
  }
  template <class Layout, class Quant>
  static simt::Counts key_stats(const PagedView<Layout, Quant>& view, const cuda::KeyStatsArgs& args,
                                const Arrays& arrays) {
    require(gpu::key_stats(view, args, arrays));
    return {};
  }
};

struct Ragged : simt::TwoRows<gpu::Layout> {
  Ragged() : TwoRows(1) {}

  void check(Window window = {}) {
    auto v = view();
    v.window = window;
    for (const bool captured : {false, true})
      simt::check_attend_by(
          v, BatchView(batch), a, heads,
          [&](const auto& of, const BatchView& b, const AttendArgs& args, const auto& plan) {
            REQUIRE(gpu::attend<Int8>({of, b, args, heads}, plan, captured));
          });
  }
};

}  // namespace

#define KVF_GPU_TEST(...)                                                           \
  TEST_CASE("a GPU agrees with ref: " #__VA_ARGS__) { check_pages<__VA_ARGS__>(); } \
  TEST_CASE("a GPU writes the CPU's bytes: " #__VA_ARGS__) {                        \
    for (const int page_tokens : {3, 32, 64})                                       \
      if (page_tokens % kvfolia::detail::largest_block<__VA_ARGS__> == 0)           \
        simt::check_same_bytes<gpu::Layout, __VA_ARGS__, Writer>(page_tokens);      \
  }
using namespace kvfolia_tests::gpu;
KVF_GPU_QUANTIZERS(KVF_GPU_TEST)

TEST_CASE("a GPU copies, gathers and scatters pages") {
  simt::check_copies<Runner>();
  simt::check_buffers<Runner>();
}

#define KVF_COMPACT_TEST(...)                                                        \
  TEST_CASE("a GPU moves tokens that a mask keeps: " #__VA_ARGS__) {                 \
    simt::check_compact<kvfolia_tests::gpu::Layout, __VA_ARGS__, Runner>(16, false); \
    simt::check_compact<kvfolia_tests::gpu::Layout, __VA_ARGS__, Runner>(3, true);   \
  }
#define KVF_STATS_TEST(...)                                                        \
  TEST_CASE("a GPU finds pages' smallest, largest and mean keys: " #__VA_ARGS__) { \
    simt::check_stats<__VA_ARGS__, Runner>();                                      \
  }
KVF_GPU_COMPACTS(KVF_COMPACT_TEST)
KVF_GPU_STATS(KVF_STATS_TEST)

TEST_CASE_METHOD(Ragged, "a GPU agrees with ref on every feature") {
  check();
  const AttendArgs plain = a.args;
  const auto with = [&](auto change) {
    a.args = plain;
    change(a.args);
    check();
  };
  const float slopes[heads] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.0f, 1.0f};
  const float sinks[heads] = {-2.0f, 0.0f, 1.0f, 4.0f, 30.0f, -100.0f};
  std::vector<std::uint8_t> bits(std::size_t{1} << 12);
  for (auto& byte : bits) byte = static_cast<std::uint8_t>(random.next());
  const std::int64_t offsets[] = {3, 1000};
  with([](AttendArgs& args) { args.causal = false; });
  with([](AttendArgs& args) { args.scale = 0.3f; });
  with([](AttendArgs& args) { args.soft_cap = 1.5f; });
  with([&](AttendArgs& args) { args.alibi_slopes = slopes; });
  with([&](AttendArgs& args) { args.sink_logits = sinks; });
  with([&](AttendArgs& args) { args.sink_logits = sinks, args.partial = true; });
  with([&](AttendArgs& args) { args.mask = {bits.data(), offsets}; });
  a.args = plain;
  for (const Window window : {Window{0, 0}, Window{3, 0}, Window{20, 4}, Window{300, 17}}) check(window);
}

int main(int argc, char** argv) {
  if (!gpu::is_available()) {
    std::puts("skipped: there is no GPU of compute capability 8.0 or later");
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
