// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Pages of one layout and quantizer, filled through cpu::append, and cpu::attend over them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "attend_measure.hpp"
#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

namespace kvfolia_bench {

template <class Layout, class Quant>
class PagesAttention final : public Attention {
 public:
  PagesAttention(const AttendCase& c, HugeMemory& memory, std::int64_t cold_bytes)
      : case_(c),
        format_(kvfolia::page_format<Layout, Quant>(c.kv_heads, c.page_tokens)),
        pages_(static_cast<std::int32_t>(c.tokens() / c.page_tokens)),
        copies_(cold_copies(bytes(), cold_bytes)),
        data_(memory.take(copies_ * copy_bytes())) {
    make_table();
    queries_ = inputs().tokens(Gaussian::queries, 0, c.query_tokens(), c.query_heads * dims);
    out_.resize(static_cast<std::size_t>(c.query_tokens() * c.query_heads * dims));
    fill();
    for (std::int64_t copy = 1; copy < copies_; ++copy)
      std::memcpy(data_ + copy * copy_bytes(), data_, static_cast<std::size_t>(copy_bytes()));
  }

  /// Encodes the tokens and plans. False when the library refuses.
  bool prepare() {
    if (!filled_) return false;
    auto plan = kvfolia::cpu::plan_attend(view(0), batch(),
                                          {.query_heads = case_.query_heads, .concurrency = case_.threads});
    if (!plan) return false;
    plan_ = std::move(*plan);
    workspace_.resize(plan_.workspace_bytes());
    return true;
  }

  std::int64_t copies() const override { return copies_; }
  std::int64_t bytes() const override { return copy_bytes(); }

  bool run(std::int64_t copy) override {
    kvfolia::AttendArgs args;
    args.queries = {queries_.data(), case_.query_heads * dims, dims};
    args.out = {out_.data(), case_.query_heads * dims, dims};
    return kvfolia::cpu::attend(view(copy), batch(), args, plan_, workspace_,
                                kvfolia::cpu::OpenMp{case_.threads})
        .has_value();
  }

  double error() override {
    // The newest query of the first and of the last sequence, of one head each.
    double worst = 0.0;
    for (const auto& [row, head] : {std::pair{0, 0}, std::pair{case_.batch - 1, case_.query_heads - 1}}) {
      const std::int64_t token = std::int64_t{row + 1} * case_.queries - 1;
      const std::int64_t at = (token * case_.query_heads + head) * dims;
      const int kv_head = head / (case_.query_heads / case_.kv_heads);
      const auto v = view(0);
      worst = std::max(worst, attention_error(queries_.data() + at, out_.data() + at, case_.keys, dims,
                                              [&, row = row](int t, float* key, float* value) {
                                                const auto [entry, slot] = place(row * case_.keys + t);
                                                decode(v, entry, slot, kv_head, key, value);
                                              }));
    }
    return worst;
  }

 private:
  static constexpr int dims = Layout::key_dim;

  std::int64_t copy_bytes() const { return pages_ * format_.slice_bytes(); }

  void make_table() {
    entries_.resize(static_cast<std::size_t>(pages_));
    std::iota(entries_.begin(), entries_.end(), 0);
    if (case_.shuffled) {
      std::uint64_t state = 1;
      for (std::size_t i = entries_.size(); i > 1; --i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::swap(entries_[i - 1], entries_[(state >> 33) % i]);
      }
    }
    lengths_.assign(static_cast<std::size_t>(case_.batch), case_.keys);
    for (int row = 0; row <= case_.batch; ++row) query_indptr_.push_back(row * case_.queries);
  }

  kvfolia::PagedView<Layout, Quant> view(std::int64_t copy) const {
    kvfolia::PagedView<Layout, Quant> view;
    std::byte* base = data_ + copy * copy_bytes();
    const auto plane = [&](const kvfolia::PlaneFormat& plane, std::int64_t offset) {
      return kvfolia::PlaneView{base + offset, format_.slice_bytes(), plane.tile_bytes, plane.slot_stride};
    };
    view.formats[kvfolia::coded_format] = {plane(format_.keys, format_.key_offset()),
                                           plane(format_.values, format_.value_offset()),
                                           plane(format_.key_params, format_.key_param_offset()),
                                           plane(format_.value_params, format_.value_param_offset()), pages_};
    view.kv_heads = case_.kv_heads;
    view.page_tokens = case_.page_tokens;
    return view;
  }

  kvfolia::BatchView batch() const {
    kvfolia::BatchView batch;
    batch.rows = case_.batch;
    batch.query_indptr = query_indptr_.data();
    batch.table.entries = entries_.data();
    batch.table.row_stride = case_.keys / case_.page_tokens;
    batch.lengths = lengths_.data();
    return batch;
  }

  std::pair<kvfolia::TableEntry, int> place(std::int64_t token) const {
    return {kvfolia::TableEntry{entries_[static_cast<std::size_t>(token / case_.page_tokens)]},
            static_cast<int>(token % case_.page_tokens)};
  }

  /// Appends a page at a time, so that quantizers that code pages as a whole can.
  void fill() {
    const int width = case_.kv_heads * dims;
    const std::int32_t indptr[] = {0, case_.page_tokens};
    std::vector<std::int64_t> slots(static_cast<std::size_t>(case_.page_tokens));
    const auto v = view(0);
    for (std::int32_t page = 0; page < pages_; ++page) {
      const std::int64_t first = std::int64_t{page} * case_.page_tokens;
      const kvfolia::TableEntry entry = place(first).first;
      for (int slot = 0; slot < case_.page_tokens; ++slot)
        slots[static_cast<std::size_t>(slot)] = kvfolia::PhysSlot::make(entry, slot, case_.page_tokens).raw;
      const kvfolia::PageRecode whole{{}, entry, 0, 0, case_.page_tokens};
      kvfolia::BatchView batch;
      batch.rows = 1;
      batch.query_indptr = indptr;
      batch.slots = slots.data();
      if (Quant::seal_tokens > 1) batch.recodes = &whole, batch.recode_count = 1;
      const auto keys = inputs().tokens(Gaussian::keys, first, case_.page_tokens, width);
      const auto values = inputs().tokens(Gaussian::values, first, case_.page_tokens, width);
      kvfolia::AppendArgs args;
      args.keys = {keys.data(), width, dims};
      args.values = {values.data(), width, dims};
      filled_ = filled_ && kvfolia::cpu::append(v, batch, args, kvfolia::cpu::serial).has_value();
    }
  }

  static void decode(const kvfolia::PagedView<Layout, Quant>& v, kvfolia::TableEntry entry, int slot,
                     int head, float* key, float* value) {
    const auto& keys = kvfolia::key_side(v.quant);
    const auto& values = kvfolia::value_side(v.quant);
    keys.decode(v.key_tile(entry, head), slot, key);
    kvfolia::from_stored(keys, key, dims);
    values.decode(v.value_tile(entry, head), slot, value);
    kvfolia::from_stored(values, value, dims);
  }

  AttendCase case_;
  kvfolia::PageFormat format_;
  std::int32_t pages_;
  std::int64_t copies_;
  std::byte* data_;
  std::vector<std::int32_t> entries_, lengths_, query_indptr_;
  std::vector<float> queries_, out_;
  bool filled_ = true;
  kvfolia::cpu::AttendPlan plan_;
  std::vector<std::byte> workspace_;
};

}  // namespace kvfolia_bench
