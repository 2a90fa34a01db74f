// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Random steps over a device's pages: batches are uploaded, kernels copy and append, events pass late.

#include "cache/random_run.hpp"
#include "kvfolia/cuda/move_pages.hpp"
#include "simt/append_scenario.hpp"
#include "support/delayed_memory.hpp"

using namespace kvfolia_tests;
using namespace kvfolia_tests::random_run;

namespace {

/// A device whose kernels the host's context runs.
class SimtMemory : public DelayedMemory {
 public:
  Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count, Stream) noexcept {
    using cuda::PageMove;
    const cuda::detail::MoveArgs args{
        .store = store,
        .copies = copies,
        .pages = nullptr,
        .buffer = nullptr,
        .count = count,
        .format = 0,
        .chunks = cuda::detail::move_chunks(cuda::detail::largest_slice(store))};
    if (auto ok = cuda::detail::check_move(args, PageMove::copy); !ok) return ok;
    simt::GlobalMemory global;
    for (const PageSlices& f : store.formats)
      if (f.base)
        global.add(f.base, static_cast<std::size_t>(f.slice_bytes * f.pages * store.layers), "pages", true);
    global.add(copies, static_cast<std::size_t>(count) * sizeof(PageCopy), "copies", false);
    simt::launch({.grid = {count * args.chunks, store.layers, 1}, .threads = cuda::detail::move_threads},
                 global, 6, [&](simt::HostContext& ctx) { cuda::move_pages<PageMove::copy>(ctx, args); });
    return {};
  }
};
static_assert(MemoryResource<SimtMemory>);

template <class LayoutT, class QuantT, class EvictT>
class OnDevice {
 public:
  using Layout = LayoutT;
  using Quant = QuantT;
  using Store = ResourceStore<SimtMemory>;
  using Cache = PagedCache<Layout, Quant, EvictT, All, Store>;

  OnDevice(const CacheConfig& config, EvictT evict, std::uint64_t seed)
      : random_(seed + 100),
        cache_(config, *Store::make(Cache::store_spec(config, evict), memory_, 0), {}, evict),
        uploads_(*Uploads<SimtMemory>::make(
            {.rows = 16, .tokens = 400, .entries = 400, .copies = 16, .recodes = 64, .in_flight = 3}, memory_,
            0)) {}
  ~OnDevice() { batches_.clear(); }

  Cache& cache() { return cache_; }
  template <class Tokens>
  void write(Batch of_step, Tokens&& tokens_of) {
    auto uploaded = uploads_.upload(std::move(of_step), 0);
    if (!uploaded) {
      CHECK(uploaded.error().code == Errc::too_many_batches);
      batches_.clear();
      memory_.advance();
      uploaded = uploads_.upload(std::move(of_step), 0);
    }
    REQUIRE(uploaded);
    memory_.catch_up();
    const auto& batch = batches_.emplace_back(*std::move(uploaded));
    // As a graph that was captured for any batch would see it, and as it is.
    const bool padded = random_.between(0, 4) == 0;
    REQUIRE(cache_.store().copy(padded ? batch.padded_copies() : batch.copies(), 0));
    for (int layer = 0; layer < layers; ++layer) {
      const NewTokens<Layout> tokens = tokens_of(batch.batch(), layer);
      if (!batch.batch().has_appends()) continue;
      simt::GlobalMemory global;
      simt::add_pages(global, cache_);
      AppendArgs args = tokens.args(kv_heads);
      std::vector<float> none(2);  // of a batch without tokens
      if (tokens.keys.empty()) args.keys.data = args.values.data = none.data();
      simt::append(global, cache_.view(LayerId{layer}), padded ? batch.padded_view() : batch.view(), args,
                   padded ? 400 : batch.tokens(), 1 + static_cast<std::uint64_t>(layer));
    }
  }
  void end_batches(bool all) {
    if (all) batches_.clear();
    if (batches_.size() > 2) batches_.erase(batches_.begin());
    if (random_.between(0, 1) == 0) memory_.advance();
    REQUIRE(uploads_.collect());
  }

 private:
  SimtMemory memory_;
  Random random_;
  Cache cache_;
  Uploads<SimtMemory> uploads_;
  std::vector<UploadedBatch<SimtMemory>> batches_;
};

template <class Layout, class Quant, class Evict = KeepAll>
void random_runs(CacheConfig config, Evict evict = {}) {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    INFO("seed " << seed);
    RandomRun<OnDevice<Layout, Quant, Evict>>(config, evict, seed).run(25);
  }
}

constexpr CacheShape small{layers, kv_heads, dynamic};

}  // namespace

TEST_CASE("random operations on a device keep what a plain list keeps: fp32 with a window") {
  random_runs<Gqa<dim, 4>, Identity<float>>({.shape = small, .pages = 40}, SinkWindow{3, 9});
}
TEST_CASE("random operations on a device keep what a plain list keeps: latent int8 with exact sinks") {
  random_runs<Mla<dim, 4, 1>, Int8>({.shape = small, .pages = 90, .exact_pages = 20, .exact_sink_pages = 2},
                                    SinkWindow{2, 17});
}
TEST_CASE("random operations on a device keep what a plain list keeps: sealed rotated pages") {
  random_runs<Gqa<dim, 4>, KeyValue<Rotated<Centered<Int4<0>, 4>>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 24, .exact_pages = 14, .order = StorageOrder::page_major});
}
TEST_CASE("random operations on a device keep what a plain list keeps: sealed pages that are demoted") {
  random_runs<Gqa<dim, 8>, Mixed<Centered<Int8, 4>, Int4Channels<8>>>(
      {.shape = small, .pages = 16, .exact_pages = 14, .low_pages = 8, .exact_sink_pages = 1},
      SinkWindow{3, 25});
}
