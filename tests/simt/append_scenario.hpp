// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Steps of two caches, one written by the CPU's append and one by the kernels' bodies: all bytes of both must
// be the same.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvfolia/cuda/append.hpp"
#include "simt/host_context.hpp"
#include "support/arrays.hpp"
#include "support/scenario.hpp"

namespace kvfolia_tests::simt {

inline Counts operator+(Counts a, const Counts& b) {
  a.switches += b.switches;
  a.warp_operations += b.warp_operations;
  a.bank_conflicts += b.bank_conflicts;
  for (auto [to, from] : {std::pair{&a.reads, &b.reads}, std::pair{&a.writes, &b.writes}}) {
    to->requests += from->requests;
    to->sectors += from->sectors;
    to->distinct += from->distinct;
    to->bytes += from->bytes;
  }
  return a;
}

/// Whether sectors hold no more than a tenth above what must be moved.
inline void check_sectors(std::uint64_t sectors, double bytes) {
  CHECK(static_cast<double>(sectors) * 32 <= 1.1 * bytes);
}

/// The memory of all pages of a cache.
template <class Cache>
Arrays page_arrays(Cache& cache, bool written = true) {
  Arrays arrays;
  for (int f = 0; f < format_count<typename Cache::Quant>; ++f)
    if (cache.pool(f).pages() > 0)
      arrays.push_back({cache.store().data(f, 0),
                        static_cast<std::size_t>(cache.store().page_bytes(f) * cache.pool(f).pages()),
                        "pages", written});
  return arrays;
}
inline void add_arrays(GlobalMemory& global, const Arrays& arrays) {
  for (const Array& array : arrays) global.add(array.data, array.bytes, array.name, array.written);
}
template <class Cache>
void add_pages(GlobalMemory& global, Cache& cache) {
  add_arrays(global, page_arrays(cache));
}

/// Rows of packed tensors, [tokens][heads][dims].
inline void add_rows(GlobalMemory& global, const ConstTensor& rows, std::int64_t tokens, const char* name) {
  if (rows.data)
    global.add(rows.data,
               static_cast<std::size_t>(tokens * rows.token_stride * (rows.type == DType::fp32 ? 4 : 2)),
               name, false);
}

/// Runs what append() launches, over pages that `global` knows.
template <class Layout, class Quant>
Counts append(GlobalMemory& global, const PagedView<Layout, Quant>& view, const BatchView& batch,
              const AppendArgs& args, std::int32_t tokens, std::uint64_t seed, bool counts_requests = false) {
  using cuda::detail::WriteKind;
  static_assert(cuda::append_supported<Layout, Quant>());
  REQUIRE(cuda::detail::check_write(view, batch, args, tokens));
  global.add(batch.slots, static_cast<std::size_t>(tokens) * sizeof(*batch.slots), "slots", false);
  if (batch.recode_count > 0)
    global.add(batch.recodes, static_cast<std::size_t>(batch.recode_count) * sizeof(*batch.recodes),
               "recodes", false);
  add_rows(global, args.keys, tokens, "keys");
  add_rows(global, args.values, tokens, "values");
  const cuda::detail::WriteArgs<Layout, Quant> all{view,   args,          batch.slots,
                                                   tokens, batch.recodes, batch.recode_count};
  const auto config = [&](int blocks, cuda::detail::ShareSizes sizes) {
    return LaunchConfig{.grid = {blocks, view.kv_heads, sizes.count},
                        .threads = cuda::detail::write_threads,
                        .shared_bytes = sizes.shared_bytes,
                        .shared_granule = 1,
                        .counts_requests = counts_requests};
  };
  Counts counts;
  constexpr auto of_tokens = cuda::detail::share_sizes<Layout, Quant, WriteKind::tokens>();
  constexpr auto of_recodes = cuda::detail::share_sizes<Layout, Quant, WriteKind::recodes>();
  if constexpr (format_count < Quant >> 1)
    if (batch.recode_count > 0)
      counts = launch(config(batch.recode_count, of_recodes), global, seed,
                      [&](HostContext& ctx) { cuda::write_recodes(ctx, all); });
  if (tokens > 0 && of_tokens.count > 0)
    counts = counts + launch(config((tokens + of_tokens.rows - 1) / of_tokens.rows, of_tokens), global,
                             seed + 1, [&](HostContext& ctx) { cuda::write_tokens(ctx, all); });
  return counts;
}

/// Who writes the second of two caches: the host's context.
struct HostWriter {
  template <class Cache>
  static void append(Cache& cache, LayerId layer, const Batch& batch, const AppendArgs& args,
                     std::uint64_t seed) {
    GlobalMemory global;
    add_pages(global, cache);
    simt::append(global, cache.view(layer), BatchView(batch), args, batch.tokens(), seed);
  }
};

/// Two caches that are always to hold the same.
template <class LayoutT, class QuantT, class Writer = HostWriter>
class Twins {
 public:
  using Layout = LayoutT;
  using Quant = QuantT;
  using Cache = PagedCache<Layout, Quant>;

  explicit Twins(const CacheConfig& config, std::uint64_t seed = 1, const Quant& quant = {})
      : cpu_(config, quant), kernels_(config, quant), random_(seed), seed_(seed) {
    poison(cpu_);
    poison(kernels_);
  }

  /// plan(step) is called for both; then new tokens come to both.
  template <class Plan>
  void step(const Plan& plan) {
    Step of_cpu = cpu_.begin_step(), of_kernels = kernels_.begin_step();
    plan(of_cpu);
    plan(of_kernels);
    const Batch a = of_cpu.commit(), b = of_kernels.commit();
    cpu_.store().copy(a.copies(), Backwards{});
    kernels_.store().copy(b.copies(), Backwards{});
    for (int layer = 0; layer < cpu_.shape().layers; ++layer) {
      const auto tokens = random_tokens<Layout>(random_, a.tokens(), cpu_.shape().kv_heads);
      const AppendArgs args = tokens.args(cpu_.shape().kv_heads);
      REQUIRE(cpu::append(cpu_.view(LayerId{layer}), a, args, cpu::serial));
      Writer::append(kernels_, LayerId{layer}, b, args, seed_++);
    }
    check_same();
  }

  void check_same() const {
    for (int f = 0; f < format_count<Quant>; ++f) {
      const std::int64_t pages = cpu_.pool(f).pages(), bytes = cpu_.stats(f).page_bytes;
      std::int64_t different = -1;
      for (std::int64_t page = 0; page < pages && different < 0; ++page)
        for (int layer = 0; layer < cpu_.shape().layers; ++layer) {
          const auto of = [&](const Cache& cache) {
            Cache& c = const_cast<Cache&>(cache);
            return c.store().data(f, layer) + page * c.store().page_stride(f);
          };
          const std::byte *a = of(cpu_), *b = of(kernels_);
          for (std::int64_t i = 0; i < bytes / cpu_.shape().layers && different < 0; ++i)
            if (a[i] != b[i]) different = page * bytes + i;
        }
      CAPTURE(f, different, bytes);
      CHECK(different == -1);
    }
  }

  Cache& cpu() { return cpu_; }
  Cache& kernels() { return kernels_; }

 private:
  Cache cpu_;
  Cache kernels_;
  Random random_;
  std::uint64_t seed_;
};

/// Sequences that come in one piece, token by token and in between, are forked, cut and, where pages have two
/// coded formats, demoted.
template <class Layout, class Quant, class Writer = HostWriter>
void check_same_bytes(int page_tokens, int exact_sink_pages = 0, const Quant& quant = {}) {
  CAPTURE(page_tokens, exact_sink_pages);
  CacheConfig config{.shape = {1, 2, page_tokens},
                     .pages = 300 / page_tokens + 8,
                     .exact_pages = exact_format<Quant> == coded_format ? 0 : 60 / page_tokens + 12,
                     .exact_sink_pages = exact_sink_pages};
  if constexpr (is_mixed<Quant>) config.low_pages = 12;
  Twins<Layout, Quant, Writer> twins(config, 1, quant);
  SeqId first{}, second{}, child{};
  const int odd = page_tokens + page_tokens / 2 + 1;
  twins.step([&](Step& step) {
    first = *step.create();
    second = *step.create();
    REQUIRE((step.extend(first, odd) && step.extend(second, 1)));
  });
  for (int i = 0; i < 2; ++i)
    twins.step([&](Step& step) { REQUIRE((step.extend(second, 1) && step.extend(first, page_tokens))); });
  twins.step([&](Step& step) { child = *step.fork(first); });
  twins.step([&](Step& step) {
    REQUIRE(
        (step.extend(child, 2) && step.extend(second, 2 * page_tokens - 3 > 0 ? 2 * page_tokens - 3 : 1)));
  });
  // Into a page that was coded as a whole, where there are such.
  twins.step([&](Step& step) {
    REQUIRE(step.truncate(first, odd - 1));
    if constexpr (is_mixed<Quant>) REQUIRE(step.demote(child, exact_sink_pages));
  });
  twins.step([&](Step& step) { REQUIRE((step.extend(first, page_tokens + 1) && step.extend(child, 1))); });
}

}  // namespace kvfolia_tests::simt
