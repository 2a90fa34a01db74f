// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The largest keys and values of a text, for policies whose scales are set before the first token.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/kv_cache.hpp"
#include "common/llama.hpp"

namespace kvfolia_examples {

/// Forwards to another cache, which must outlive it, and remembers the largest magnitudes stored.
class AmaxRecorder final : public KvCache {
 public:
  AmaxRecorder(KvCache& cache, const KvShape& shape) : cache_(cache), shape_(shape) {}

  SeqId create() override { return cache_.create(); }
  SeqId fork(SeqId parent) override { return cache_.fork(parent); }
  std::int32_t length(SeqId sequence) const override { return cache_.length(sequence); }

  void begin(std::span<const Row> rows) override {
    tokens_ = 0;
    for (const Row& row : rows) tokens_ += row.tokens;
    cache_.begin(rows);
  }
  void attend(int layer, const float* queries, const float* keys, const float* values, float* out) override {
    const std::int64_t count = tokens_ * shape_.kv_heads * shape_.head_dim;
    for (std::int64_t i = 0; i < count; ++i) {
      seen_.key_amax = std::max(seen_.key_amax, std::abs(keys[i]));
      seen_.value_amax = std::max(seen_.value_amax, std::abs(values[i]));
    }
    cache_.attend(layer, queries, keys, values, out);
  }
  void end() override { cache_.end(); }

  Report report() const override { return cache_.report(); }
  double bits_per_value() const override { return cache_.bits_per_value(); }

  /// Over all layers, heads and tokens so far.
  Calibration seen() const { return seen_; }

 private:
  KvCache& cache_;
  KvShape shape_;
  std::int64_t tokens_ = 0;  ///< of the step at hand
  Calibration seen_{};
};

/// Runs the tokens through the model with a float32 cache.
inline Calibration calibrate(const Llama& model, std::span<const TokenId> tokens, KvOptions options) {
  constexpr std::size_t chunk = 256;
  options.policy = parse_policy("fp32");
  options.max_tokens = static_cast<std::int32_t>(tokens.size());
  const auto cache = make_kv_cache(model.kv_shape(), options);
  AmaxRecorder recorder(*cache, model.kv_shape());
  const SeqId sequence = recorder.create();
  for (std::size_t done = 0; done < tokens.size(); done += chunk) {
    const Llama::Row row{sequence, tokens.subspan(done, std::min(chunk, tokens.size() - done))};
    model.forward({&row, 1}, recorder);
  }
  return recorder.seen();
}

}  // namespace kvfolia_examples
