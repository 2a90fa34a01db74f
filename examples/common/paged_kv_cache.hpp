// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The template behind make_kv_cache. Each of its instantiations lives in one of the kv_cache_*.cpp, which
// compile side by side.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/kv_cache.hpp"
#include "common/page_mass.hpp"
#include "common/program.hpp"
#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

namespace kvfolia_examples {

using namespace kvfolia;

template <class T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error("the cache refuses: " + result.error().message());
  return *std::move(result);
}
inline void check(const Result<>& result) {
  if (!result) throw std::runtime_error("the cache refuses: " + result.error().message());
}

/// A quantizer whose scale, if it has one for the whole cache, fits values of magnitude up to amax.
template <class Q>
Q calibrated_side(float amax, int dims) {
  Q quant{};
  if constexpr (rotates<Q>) amax *= std::sqrt(static_cast<float>(Q::block(dims)));  // at worst
  const auto set = [&]<class S>(S& scaled) {
    if constexpr (requires { S::calibrated(amax); })
      if (amax > 0.0f) static_cast<decltype(S::calibrated(amax))&>(scaled) = S::calibrated(amax);
  };
  if constexpr (requires { quant.inner; })
    set(quant.inner);
  else
    set(quant);
  return quant;
}
template <class Quant>
Quant calibrated(const Calibration& c, int dims) {
  if constexpr (requires { typename Quant::Key; })
    return {calibrated_side<typename Quant::Key>(c.key_amax, dims),
            calibrated_side<typename Quant::Value>(c.value_amax, dims)};
  else if constexpr (is_mixed<Quant>)
    return {calibrated<typename Quant::High>(c, dims), calibrated<typename Quant::Low>(c, dims)};
  else
    return calibrated_side<Quant>(std::max(c.key_amax, c.value_amax), dims);
}

template <class Layout, class Quant, class Evict>
class PagedKvCache final : public KvCache {
 public:
  PagedKvCache(const KvShape& shape, const KvOptions& options, Evict evict)
      : shape_(shape),
        exec_{options.threads},
        path_(options.plain_path ? cpu::AttendPath::plain : cpu::AttendPath::fast),
        high_share_(options.policy.mixed.value_or(100.0) / 100.0),
        cache_(config(shape, options), calibrated<Quant>(options.calibration, shape.head_dim), evict) {}

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
        cpu::plan_attend(cache_.view(LayerId{0}), *batch_, {shape_.query_heads, exec_.concurrency(), path_}));
    workspace_.resize(plan_.workspace_bytes());
  }

  void attend(int layer, const float* queries, const float* keys, const float* values, float* out) override {
    const auto start = std::chrono::steady_clock::now();
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
    attend_seconds_ += seconds_since(start);
    if constexpr (is_mixed<Quant>) mass_.measure(view, *batch_, cache_, shape_.query_heads, queries, exec_);
  }

  void end() override {
    if constexpr (is_mixed<Quant>) demote_pages();
    batch_.reset();
  }

  Report report() const override {
    Report report{.attend_seconds = attend_seconds_};
    for (int format = 0; format < format_count<Quant>; ++format) {
      const FormatStats stats = cache_.stats(format);
      report.pages_used += stats.held;
      report.bytes_used += stats.bytes_held();
      report.pages_shared += stats.shared;
      report.bytes_saved += stats.bytes_saved();
    }
    return report;
  }

  double bits_per_value() const override {
    const int tokens = cache_.page_tokens();
    if constexpr (!is_mixed<Quant>) {
      return kvfolia::bits_per_value<Layout, Quant>(tokens);
    } else {
      const auto high = static_cast<double>(cache_.stats().held);
      const auto low = static_cast<double>(cache_.stats(low_format<Quant>).held);
      const double high_bits = kvfolia::bits_per_value<Layout, typename Quant::High>(tokens);
      const double low_bits = kvfolia::bits_per_value<Layout, typename Quant::Low>(tokens);
      return high + low == 0.0 ? high_bits : (high * high_bits + low * low_bits) / (high + low);
    }
  }

 private:
  /// Leaves the share of the full pages in the high format that the policy names: those that queries
  /// looked at most. A step of its own, once the batch's queries have read their pages.
  void demote_pages() {
    Step step = cache_.begin_step();
    for (std::int32_t row = 0; row < batch_->rows(); ++row) demote(step, batch_->sequence(row));
    const Batch demoted = step.commit();
    for (int layer = 0; layer < shape_.layers && demoted.has_appends(); ++layer)
      check(cpu::append(cache_.view(LayerId{layer}), demoted, {}, exec_));
  }
  void demote(Step& step, SeqId sequence) {
    const SequenceInfo info = value_of(cache_.sequence(sequence));
    struct Page {
      double importance;
      std::int32_t index;
      TableEntry entry;
    };
    std::vector<Page> high;
    std::int64_t full = 0;
    for (std::size_t i = 0; i < info.pages.size(); ++i) {
      const TablePage& page = info.pages[i];
      if (page.begin.value + cache_.page_tokens() > info.length) break;
      if (page.entry.format() == exact_format<Quant>) continue;
      ++full;
      if (page.entry.format() == coded_format)
        high.push_back({mass_.of(page.entry), static_cast<std::int32_t>(i), page.entry});
    }
    std::sort(high.begin(), high.end(),
              [](const Page& a, const Page& b) { return a.importance < b.importance; });
    const auto keep = static_cast<std::size_t>(std::ceil(high_share_ * static_cast<double>(full)));
    for (std::size_t i = 0; i + keep < high.size(); ++i) {
      check(step.demote(sequence, high[i].index));
      mass_.forget(high[i].entry);
    }
  }

  /// Enough for every sequence at its longest, and for a copy of each one's shared last page.
  static CacheConfig config(const KvShape& shape, const KvOptions& options) {
    const std::int64_t pages =
        (std::int64_t{options.max_tokens} + options.page_tokens - 1) / options.page_tokens + 2;
    const std::int64_t sinks = std::min<std::int64_t>(options.policy.exact_sink_pages, pages);
    const std::int64_t tails = Quant::seal_tokens > 1 ? 2 : 0;
    return {.shape = {shape.layers, shape.kv_heads, options.page_tokens},
            .pages = options.max_sequences * pages,
            .exact_pages = options.max_sequences * ((sinks > 0 ? sinks + 1 : 0) + tails),
            .low_pages = is_mixed<Quant> ? options.max_sequences * pages : 0,
            .exact_sink_pages = options.policy.exact_sink_pages,
            .huge_pages = true};
  }

  KvShape shape_;
  cpu::OpenMp exec_;
  cpu::AttendPath path_;
  double high_share_;
  PageMass mass_;
  PagedCache<Layout, Quant, Evict> cache_;
  std::optional<Batch> batch_;
  cpu::AttendPlan plan_;
  std::vector<std::byte> workspace_;
  double attend_seconds_ = 0.0;
};

template <class Layout, class Quant>
std::unique_ptr<KvCache> with_evict(const KvShape& shape, const KvOptions& options) {
  if (!page_tokens_fit<Layout>(options.page_tokens))
    throw std::invalid_argument("--page-tokens " + std::to_string(options.page_tokens) +
                                " does not fit --order dim with " + options.policy.name +
                                ": it must be a multiple of " +
                                std::to_string(Layout::ValueOrder::slot_multiple));
  if (!blocks_fit<Quant>(options.page_tokens))
    throw std::invalid_argument("--page-tokens " + std::to_string(options.page_tokens) + " does not fit " +
                                options.policy.name + ": it codes blocks of " +
                                std::to_string(Quant::seal_tokens) + " tokens");
  if (options.policy.window)
    return std::make_unique<PagedKvCache<Layout, Quant, SinkWindow>>(
        shape, options, SinkWindow{options.policy.sink_tokens, *options.policy.window});
  return std::make_unique<PagedKvCache<Layout, Quant, KeepAll>>(shape, options, KeepAll{});
}

/// A policy's name without options, and the quantizer that it stands for.
template <class QuantT>
struct Named {
  using Quant = QuantT;
  const char* parts;
};

/// What one kv_cache_*.cpp instantiates.
struct Family {
  std::vector<std::string> parts;
  /// Null when the policy is none of the family's.
  std::unique_ptr<KvCache> (*make)(const KvShape& shape, const KvOptions& options);
};
Family exact_family();
Family int8_family();
Family int4_family();
Family float_family();

[[noreturn]] inline void refuse_head_dim(int head_dim, const char* there_are) {
  throw std::runtime_error("head dim " + std::to_string(head_dim) +
                           " is not instantiated here: " + there_are);
}

/// The caches of a list of Named quantizers, in slot-major order.
template <const auto& Quantizers>
Family family_of() {
  Family family;
  std::apply([&](auto... named) { (family.parts.push_back(named.parts), ...); }, Quantizers);
  family.make = [](const KvShape& shape, const KvOptions& options) {
    const std::string parts = options.policy.parts();
    std::unique_ptr<KvCache> cache;
    const auto attempt = [&]<class Quant>(Named<Quant> named) {
      if (cache || parts != named.parts) return;
      if (options.order == ElementOrderName::dim)
        throw std::invalid_argument("policy '" + options.policy.name + "': only --order slot has kernels");
      if (shape.head_dim != 64)
        refuse_head_dim(shape.head_dim, "64 is; fp32, fp16, bf16 and int8 have 128, too");
      cache = with_evict<Gqa<64, dynamic>, Quant>(shape, options);
    };
    std::apply([&](auto... named) { (attempt(named), ...); }, Quantizers);
    return cache;
  };
  return family;
}

}  // namespace kvfolia_examples
