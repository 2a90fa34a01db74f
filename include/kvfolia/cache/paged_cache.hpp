// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The cache: block tables on the host, pages in a store, and views of both for kernels.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvfolia/cache/cache_state.hpp"
#include "kvfolia/cache/step.hpp"
#include "kvfolia/core/cache_shape.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/page/host_store.hpp"

namespace kvfolia::inline KVF_ABI {

// A cache names its default policies but knows none: evict/keep_all.hpp, select/all.hpp.
struct KeepAll;
struct All;

struct CacheConfig {
  CacheShape shape{};
  std::int64_t pages = 0;        ///< of the quantizer's own format
  std::int64_t exact_pages = 0;  ///< for exact sinks, and for the unfinished page of every sequence where
                                 ///< the quantizer needs several tokens at once; exact quantizers need none
  std::int64_t low_pages = 0;    ///< for what Mixed demotes
  std::int32_t exact_sink_pages = 0;  ///< so many first pages of a sequence are never coded
  StorageOrder order = StorageOrder::layer_major;
  bool huge_pages = false;  ///< see StoreSpec
};

/// A sequence as its cache knows it.
struct SequenceInfo {
  std::int32_t length;               ///< logical positions, evicted ones counted
  std::int32_t retained;             ///< tokens whose keys and values are still there
  std::span<const TablePage> pages;  ///< the cache's own: valid until its next operation
};

/// Pages and bytes of one format. Bytes are those of all layers.
struct FormatStats {
  std::int64_t pages;
  std::int64_t free;
  std::int64_t held;
  std::int64_t retired;
  std::int64_t shared;      ///< held pages with more than one reference
  std::int64_t references;  ///< what held would be if nothing were shared
  std::int64_t page_bytes;
  std::int64_t bytes_held() const { return held * page_bytes; }
  std::int64_t bytes_saved() const { return (references - held) * page_bytes; }
};

/// The keys and values of many sequences, in pages. All layers share one block table.
///
/// Threads: one thread at a time may write, that is call begin_step and anything on the Step, destroy
/// a Batch, or run copies and appends. Any number of threads may read views and committed batches
/// meanwhile, as long as no append writes the slots that they read. The cache must outlive the views,
/// not the batches.
template <LayoutPolicy LayoutT, QuantPolicy QuantT, EvictPolicy EvictT = KeepAll, SelectPolicy SelectT = All,
          PageStore StoreT = HostStore>
class PagedCache {
 public:
  using Layout = LayoutT;
  using Quant = QuantT;
  using Evict = EvictT;
  using Select = SelectT;
  using Store = StoreT;
  using View = PagedView<Layout, Quant>;

  /// Throws contract_error, naming the argument, when the configuration makes no cache.
  explicit PagedCache(const CacheConfig& config, Quant quant = {}, Evict evict = {})
      : PagedCache(config, Store(store_spec(config, evict)), quant, evict) {}

  /// Over a store that was made with store_spec(config, evict).
  PagedCache(const CacheConfig& config, Store store, Quant quant = {}, Evict evict = {})
      : shape_(config.shape),
        quant_(quant),
        evict_(evict),
        state_(std::make_shared<detail::CacheState>(rules(config, evict), page_counts(config))),
        store_(std::move(store)) {}

  /// Checks the configuration and says what memory it needs.
  static StoreSpec store_spec(const CacheConfig& config, Evict evict = {}) {
    check(config, evict);
    StoreSpec spec{{}, config.shape.layers, config.order, config.huge_pages};
    for (int f = 0; f < format_count<Quant>; ++f)
      spec.formats.push_back(
          {format(config.shape, f).slice_bytes(), page_counts(config)[static_cast<std::size_t>(f)]});
    return spec;
  }

  Step begin_step() { return Step(state_); }

  /// One layer's pages. Stays valid as long as the cache.
  View view(LayerId layer) const {
    KVF_ASSERT(0 <= layer.value && layer.value < shape_.layers);
    View view;
    view.kv_heads = shape_.kv_heads;
    view.page_tokens = page_tokens();
    view.window = evict_.visible();
    view.quant = quant_;
    for (int f = 0; f < format_count<Quant>; ++f) {
      const std::int64_t pages = pool(f).pages();
      if (pages == 0) continue;
      const PageFormat format = PagedCache::format(shape_, f);
      std::byte* base = store_.data(f, layer.value);
      const std::int64_t stride = store_.page_stride(f);
      FormatView& to = view.formats[f];
      const auto plane = [&](std::int64_t offset, const PlaneFormat& tiles) {
        return PlaneView{base + offset, stride, tiles.tile_bytes, tiles.slot_stride};
      };
      to.keys = plane(format.key_offset(), format.keys);
      to.values = plane(format.value_offset(), format.values);
      to.key_params = plane(format.key_param_offset(), format.key_params);
      to.value_params = plane(format.value_param_offset(), format.value_params);
      to.pages = static_cast<std::int32_t>(pages);
    }
    return view;
  }

  Store& store() { return store_; }
  const Store& store() const { return store_; }
  const CacheShape& shape() const { return shape_; }
  int page_tokens() const { return state_->rules().page_tokens; }
  const Quant& quant() const { return quant_; }
  const Evict& evict() const { return evict_; }

  Result<SequenceInfo> sequence(SeqId id) const {
    const auto* slot = state_->find(id);
    if (!slot) return Error{Errc::unknown_sequence, "sequence", id.value, 0};
    return SequenceInfo{slot->sequence.length, slot->sequence.retained(), slot->sequence.pages};
  }

  /// O(pages).
  FormatStats stats(int format = coded_format) const {
    const PagePool& pool = this->pool(format);
    FormatStats stats{pool.pages(),
                      pool.free_pages(),
                      pool.held_pages(),
                      pool.retired_pages(),
                      0,
                      0,
                      PagedCache::format(shape_, format).slice_bytes() * shape_.layers};
    for (std::int32_t page = 0; page < pool.pages(); ++page) {
      const std::int32_t references = pool.references(PageId{page});
      stats.shared += references > 1 ? 1 : 0;
      stats.references += references;
    }
    return stats;
  }
  const PagePool& pool(int format = coded_format) const {
    return state_->pools()[static_cast<std::size_t>(format)];
  }

  /// Every broken invariant in one readable line; empty when all is well. O(pages + table entries).
  std::vector<std::string> verify() const { return state_->verify(); }

 private:
  static PageFormat format(const CacheShape& shape, int f) {
    const int tokens = resolved_page_tokens(shape);
    if constexpr (1 < format_count<Quant>) {
      if (f == 1) return page_format<Layout, FormatQuant<1, Quant>>(shape.kv_heads, tokens);
    }
    if constexpr (2 < format_count<Quant>) {
      if (f == 2) return page_format<Layout, FormatQuant<2, Quant>>(shape.kv_heads, tokens);
    }
    return page_format<Layout, FormatQuant<0, Quant>>(shape.kv_heads, tokens);
  }

  static int resolved_page_tokens(const CacheShape& shape) {
    return shape.page_tokens == dynamic ? Layout::page_tokens : shape.page_tokens;
  }

  static std::vector<std::int64_t> page_counts(const CacheConfig& config) {
    std::vector<std::int64_t> counts{config.pages};
    if constexpr (exact_format<Quant> != coded_format) counts.push_back(config.exact_pages);
    if constexpr (is_mixed<Quant>) counts.push_back(config.low_pages);
    return counts;
  }

  static TableRules rules(const CacheConfig& config, Evict evict) {
    check(config, evict);
    TableRules rules;
    rules.page_tokens = resolved_page_tokens(config.shape);
    rules.exact_sink_pages = config.exact_sink_pages;
    rules.exact_format = exact_format<Quant>;
    rules.coded_format = coded_format;
    rules.low_format = low_format<Quant>;
    rules.seals = Quant::seal_tokens > 1;
    rules.window = evict.visible();
    return rules;
  }

  static void check(const CacheConfig& config, Evict evict) {
    const CacheShape& shape = config.shape;
    detail::require(shape.layers > 0, "shape.layers must be positive");
    detail::require(shape.kv_heads > 0, "shape.kv_heads must be positive");
    detail::require(page_tokens_fit<Layout>(resolved_page_tokens(shape)),
                    "shape.page_tokens must be given, equal the layout's, and be a multiple of what its "
                    "element orders group");
    detail::require(blocks_fit<Quant>(resolved_page_tokens(shape)),
                    "shape.page_tokens must be a multiple of the quantizer's seal_tokens");
    for (const std::int64_t pages : {config.pages, config.exact_pages, config.low_pages})
      detail::require(
          0 <= pages && pages <= TableEntry::max_pages,
          "pages, exact_pages and low_pages must not be negative and fit a table entry (at most 2^29)");
    // In floating point: the product itself may overflow. No format takes 64 bits a value.
    const double tile =
        static_cast<double>(resolved_page_tokens(shape)) * (Layout::key_dim + Layout::value_dim) * 64;
    detail::require(tile * shape.kv_heads * shape.layers < 0x1p60,
                    "shape: the bytes of a page must fit 64 bits: fewer kv_heads, layers or page_tokens");
    detail::require(config.exact_sink_pages >= 0, "exact_sink_pages must not be negative");
    constexpr bool has_exact = exact_format<Quant> != coded_format;
    detail::require(config.exact_sink_pages == 0 || !has_exact || config.exact_pages > 0,
                    "exact_pages must be positive when there are exact_sink_pages");
    detail::require(Quant::seal_tokens == 1 || config.pages == 0 || config.exact_pages > 0,
                    "exact_pages must be positive: the quantizer needs several tokens at once, so every "
                    "sequence's unfinished page is exact");
    detail::require(is_mixed<Quant> || config.low_pages == 0, "low_pages are for Mixed quantizers");
    detail::require(evict.visible().left >= -1, "evict: the window must hold at least one token");
    detail::require(evict.visible().sink_tokens >= 0, "evict: sink_tokens must not be negative");
  }

  CacheShape shape_;
  Quant quant_;
  Evict evict_;
  std::shared_ptr<detail::CacheState> state_;
  Store store_;
};

}  // namespace kvfolia::inline KVF_ABI
