// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "cpu/fast_pools.hpp"

#include <algorithm>
#include <stdexcept>

#include "kvfolia/cpu.hpp"

namespace kvfolia_tests {

using namespace kvfolia;

namespace {

/// A workspace that is full of NaN, between bytes that must stay. Sanitizers put their own around it.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes) {
#if defined(__SANITIZE_ADDRESS__)
    guard_ = 0;
#endif
    memory_.reset(new std::byte[bytes + 2 * guard_]);
    std::memset(memory_.get(), 0xa5, bytes + 2 * guard_);
    std::memset(memory_.get() + guard_, 0xff, bytes);
  }
  std::span<std::byte> span() const { return {memory_.get() + guard_, bytes_}; }
  bool intact() const {
    const auto kept = [](std::byte b) { return b == std::byte{0xa5}; };
    return std::all_of(memory_.get(), memory_.get() + guard_, kept) &&
           std::all_of(memory_.get() + guard_ + bytes_, memory_.get() + 2 * guard_ + bytes_, kept);
  }

 private:
  std::size_t bytes_, guard_ = 4096;
  std::unique_ptr<std::byte[]> memory_;
};

template <class Layout, class Quant>
class PoolOf final : public Pool {
 public:
  explicit PoolOf(const PoolSpec& with, const Quant& quant) {
    spec = with;
    key_dim = Layout::key_dim;
    value_dim = Layout::value_dim;
    shares = Layout::shares_key_value;
    formats = format_count<Quant>;
    exact = exact_format<Quant>;
    seal_tokens = Quant::seal_tokens;
    rounds_few = cpu::rounds_operands<Layout, Quant>(1);
    rounds_many = cpu::rounds_operands<Layout, Quant>(5);
    view_.kv_heads = spec.kv_heads;
    view_.page_tokens = spec.page_tokens;
    view_.quant = quant;
    lay_out<0>();
  }

  void write(int format, int page, const float* keys, const float* values, int used) override {
    const TableEntry entry = TableEntry::make(format, PageId{page});
    visit_format(view_, entry, [&](const auto& quant) {
      for (int head = 0; head < spec.kv_heads; ++head) {
        encode(key_side(quant), view_.key_tile(entry, head), keys + head * key_dim, key_dim, used);
        if constexpr (!Layout::shares_key_value)
          encode(value_side(quant), view_.value_tile(entry, head), values + head * value_dim, value_dim,
                 used);
      }
    });
  }

  Result<ref::Attention> ref(const BatchView& batch, const AttendArgs& args, int heads,
                             Window window) const override {
    auto view = view_;
    view.window = window;
    return ref::attend(view, batch, args, heads);
  }

  std::string attend(const BatchView& batch, const AttendArgs& args, int heads, Window window, bool plain,
                     const AnyOrder& order) const override {
    auto view = view_;
    view.window = window;
    const auto path = plain ? cpu::AttendPath::plain : cpu::AttendPath::fast;
    const auto plan = cpu::plan_attend(view, batch, {heads, order.threads, path});
    if (!plan) return plan.error().message();
    const Workspace workspace(plan->workspace_bytes());
    const auto ok = cpu::attend(view, batch, args, *plan, workspace.span(), order);
    if (!ok) return ok.error().message();
    return workspace.intact() ? "" : "wrote outside of the workspace";
  }

 private:
  template <int Format>
  void lay_out() {
    using Q = FormatQuant<Format, Quant>;
    FormatView& f = view_.formats[Format];
    f.pages = spec.pages;
    plane<typename Layout::KeyOrder, KeySide<Q>>(key_dim, f.keys, f.key_params);
    if constexpr (!Layout::shares_key_value)
      plane<typename Layout::ValueOrder, ValueSide<Q>>(value_dim, f.values, f.value_params);
    if constexpr (Format + 1 < format_count<Quant>) lay_out<Format + 1>();
  }

  template <class Order, class Q>
  void plane(int dims, PlaneView& codes, PlaneView& params) {
    const std::int64_t token = code_bytes<Q>(dims);
    const bool inside = spec.heads_inside && Order::strided;
    codes = place(token * spec.page_tokens, inside ? token : 0, token);
    const std::int64_t bytes = Q::param_bytes(dims, spec.page_tokens);
    if (bytes == 0) return;
    const std::int64_t slot = Q::seal_tokens == 1 ? bytes / spec.page_tokens : 0;
    params = place(bytes, spec.heads_inside && slot > 0 ? slot : 0, slot);
  }
  /// `inner` is the distance of heads where they lie inside of slots, 0 where each has a part of the page.
  PlaneView place(std::int64_t tile, std::int64_t inner, std::int64_t slot) {
    const std::int64_t heads = spec.kv_heads, bytes = spec.pages * heads * tile;
    memory_.emplace_back(new std::byte[static_cast<std::size_t>(bytes)]);
    std::memset(memory_.back().get(), 0xff, static_cast<std::size_t>(bytes));
    return {memory_.back().get(), heads * tile, inner > 0 ? inner : tile, inner > 0 ? heads * slot : slot};
  }

  template <class Q, class Tile>
  void encode(const Q& quant, Tile tile, const float* from, int dims, int used) const {
    const int stride = spec.kv_heads * dims;
    const int tokens = Q::seal_tokens == 1 ? used : spec.page_tokens;
    std::vector<float> rows(static_cast<std::size_t>(tokens * dims));
    for (int t = 0; t < tokens; ++t) {
      std::copy_n(from + t * stride, dims, rows.data() + t * dims);
      to_stored(quant, rows.data() + t * dims, dims);
    }
    quant.encode(tile, 0, tokens, Rows{rows.data(), dims});
  }

  PagedView<Layout, Quant> view_{};
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

template <class Layout, class Quant>
PoolKind kind(const char* name, std::vector<int> pages, Quant quant = {}) {
  return {name, std::move(pages),
          [quant](const PoolSpec& spec) { return std::make_unique<PoolOf<Layout, Quant>>(spec, quant); }};
}

}  // namespace

const std::vector<PoolKind>& pool_kinds() {
  static const std::vector<int> any = {1, 3, 16, 19, 32, 64}, even = {16, 32, 64}, fours = {4, 20, 64},
                                blocks = {32, 64};
  static const std::vector<PoolKind> kinds = {
      kind<Gqa<128, dynamic>, Identity<float>>("fp32, 128 dims", any),
      kind<Gqa<40, dynamic>, Identity<fp16>>("fp16, 40 dims", any),
      kind<Gqa<64, dynamic, DimMajor<2>>, Identity<bf16>>("bf16, two dims at once", any),
      kind<Gqa<72, dynamic, DimMajor<4>>, Int8>("int8, four of 72 dims at once", any),
      kind<Gqa<96, dynamic>, Int8Groups<32>>("int8 in groups, 96 dims", any),
      kind<Gqa<80, dynamic, DimMajor<8>>, Int4<32>>("int4, eight of 80 dims at once", any),
      kind<Gqa<128, dynamic, DimMajor<8>, SlotPairs<2>>, KeyValue<Int4Symmetric<32>, Int8>>(
          "symmetric int4, pairs of int8 values", even),
      kind<Gqa<96, dynamic, DimMajor<4>, SlotPairs<4>>, KeyValue<Int8, Int8Groups<32>>>(
          "fours of int8 values in groups", fours),
      kind<Gqa<64, dynamic, DimMajor<8>>, KeyValue<Int4Channels<32>, Int4<32>>>("int4 channels", blocks),
      kind<Gqa<256, dynamic, DimMajor<1>>, Fp8<>>("fp8, one of 256 dims at once", any),
      kind<Gqa<64, dynamic>, KeyValue<Nvfp4, Mxfp4>>("nvfp4 and mxfp4", any, {Nvfp4::calibrated(8.0f), {}}),
      kind<Gqa<64, dynamic, DimMajor<4>>, KeyValue<Centered<Int8>, Rotated<Int8>>>("centred and rotated int8",
                                                                                   blocks),
      kind<Gqa<96, dynamic>, KeyValue<Compact4Channels<32>, Q8_0>>("compact int4 channels and q8_0", blocks),
      kind<Gqa<64, dynamic, DimMajor<4>>, Mixed<Fp8<fp8_e5m2>, Int4<32>>>("e5m2 and int4 mixed", any),
      kind<Mla<96, 32, dynamic>, Int4<32>>("latent int4", any),
      kind<Mla<64, 8, dynamic, DimMajor<4>>, Int8>("latent int8, four dims at once", any),
  };
  return kinds;
}

const PoolKind& pool_kind(const char* name) {
  for (const PoolKind& kind : pool_kinds())
    if (std::strcmp(kind.name, name) == 0) return kind;
  throw std::invalid_argument(name);
}

}  // namespace kvfolia_tests
