// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The instantiations behind make_kv_cache: head dims, quantizers, element orders, evictions.

#include "common/kv_cache.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

namespace kvfolia_examples {
namespace {

using namespace kvfolia;

template <class T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error("the cache refuses: " + result.error().message());
  return *std::move(result);
}
void check(const Result<>& result) {
  if (!result) throw std::runtime_error("the cache refuses: " + result.error().message());
}

template <class Layout, class Quant, class Evict>
class PagedKvCache final : public KvCache {
 public:
  PagedKvCache(const KvShape& shape, const KvOptions& options, Evict evict)
      : shape_(shape), exec_{options.threads}, cache_(config(shape, options), {}, evict) {}

  SeqId create() override {
    Step step = cache_.begin_step();
    const SeqId id = value_of(step.create());
    step.commit();
    return id;
  }

  SeqId fork(SeqId parent) override {
    Step step = cache_.begin_step();
    const SeqId id = value_of(step.fork(parent));
    step.commit();
    return id;
  }

  std::int32_t length(SeqId sequence) const override { return value_of(cache_.sequence(sequence)).length; }

  void begin(std::span<const Row> rows) override {
    Step step = cache_.begin_step();
    for (const Row& row : rows) check(step.extend(row.sequence, row.tokens));
    batch_ = step.commit();
    cache_.store().copy(batch_->copies(), exec_);
    plan_ = value_of(
        cpu::plan_attend(cache_.view(LayerId{0}), *batch_, {shape_.query_heads, exec_.concurrency()}));
    workspace_.resize(plan_.workspace_bytes());
  }

  void attend(int layer, const float* queries, const float* keys, const float* values, float* out) override {
    const auto view = cache_.view(LayerId{layer});
    const std::int64_t dim = shape_.head_dim;
    AppendArgs append;
    append.keys = {keys, shape_.kv_heads * dim, dim};
    append.values = {values, shape_.kv_heads * dim, dim};
    check(cpu::append(view, *batch_, append, exec_));
    AttendArgs attend;
    attend.queries = {queries, shape_.query_heads * dim, dim};
    attend.out = {out, shape_.query_heads * dim, dim};
    check(cpu::attend(view, *batch_, attend, plan_, workspace_, exec_));
  }

  void end() override { batch_.reset(); }

  Report report() const override {
    Report report;
    for (int format = 0; format < format_count<Quant>; ++format) {
      const FormatStats stats = cache_.stats(format);
      report.pages_used += stats.held;
      report.bytes_used += stats.bytes_held();
      report.pages_shared += stats.shared;
      report.bytes_saved += stats.bytes_saved();
    }
    return report;
  }

 private:
  /// Enough for every sequence at its longest, and for a copy of each one's shared last page.
  static CacheConfig config(const KvShape& shape, const KvOptions& options) {
    const std::int64_t pages =
        (std::int64_t{options.max_tokens} + options.page_tokens - 1) / options.page_tokens + 2;
    const std::int64_t sinks = std::min<std::int64_t>(options.policy.exact_sink_pages, pages);
    return {.shape = {shape.layers, shape.kv_heads, options.page_tokens},
            .pages = options.max_sequences * pages,
            .exact_pages = options.max_sequences * (sinks > 0 ? sinks + 1 : 0),
            .exact_sink_pages = options.policy.exact_sink_pages,
            .huge_pages = true};
  }

  KvShape shape_;
  cpu::OpenMp exec_;
  PagedCache<Layout, Quant, Evict> cache_;
  std::optional<Batch> batch_;
  cpu::AttendPlan plan_;
  std::vector<std::byte> workspace_;
};

template <class Layout, class Quant>
std::unique_ptr<KvCache> with_evict(const KvShape& shape, const KvOptions& options) {
  if (!page_tokens_fit<Layout>(options.page_tokens))
    throw std::invalid_argument("--page-tokens " + std::to_string(options.page_tokens) +
                                " does not fit --order dim with " + options.policy.name +
                                ": it must be a multiple of " +
                                std::to_string(Layout::ValueOrder::slot_multiple));
  if (options.policy.window)
    return std::make_unique<PagedKvCache<Layout, Quant, SinkWindow>>(
        shape, options, SinkWindow{options.policy.sink_tokens, *options.policy.window});
  return std::make_unique<PagedKvCache<Layout, Quant, KeepAll>>(shape, options, KeepAll{});
}

/// Dim-major keys and paired values, as many elements side by side as 32 bits hold.
template <int HeadDim, class Quant>
std::unique_ptr<KvCache> with_order(const KvShape& shape, const KvOptions& options) {
  constexpr int x = 32 / Quant::code_bits;
  if (options.order == ElementOrderName::dim)
    return with_evict<Gqa<HeadDim, dynamic, DimMajor<x>, SlotPairs<x>>, Quant>(shape, options);
  return with_evict<Gqa<HeadDim, dynamic>, Quant>(shape, options);
}

template <int HeadDim>
std::unique_ptr<KvCache> with_quant(const KvShape& shape, const KvOptions& options) {
  switch (options.policy.base) {
    case Policy::Base::fp32: return with_order<HeadDim, Identity<float>>(shape, options);
    case Policy::Base::fp16: return with_order<HeadDim, Identity<fp16>>(shape, options);
    case Policy::Base::bf16: return with_order<HeadDim, Identity<bf16>>(shape, options);
    case Policy::Base::int8: return with_order<HeadDim, Int8>(shape, options);
  }
  throw std::invalid_argument("policy '" + options.policy.name + "' is not instantiated here");
}

}  // namespace

std::unique_ptr<KvCache> make_kv_cache(const KvShape& shape, const KvOptions& options) {
  switch (shape.head_dim) {
    case 64: return with_quant<64>(shape, options);
    case 128: return with_quant<128>(shape, options);
    default:
      throw std::runtime_error("head dim " + std::to_string(shape.head_dim) +
                               " is not instantiated here: 64 and 128 are");
  }
}

}  // namespace kvfolia_examples
