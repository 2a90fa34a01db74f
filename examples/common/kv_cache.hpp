// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// One run-time interface over the many PagedCache types that a command line can name.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/policy.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia_examples {

using kvfolia::SeqId;

/// What a model needs of its key/value cache. Failures are std::runtime_error.
class KvCache {
 public:
  struct Row {
    SeqId sequence;
    std::int32_t tokens;
  };
  struct Report {
    std::int64_t pages_used = 0;
    std::int64_t bytes_used = 0;
    std::int64_t pages_shared = 0;
    std::int64_t bytes_saved = 0;  ///< by sharing
    double attend_seconds = 0.0;   ///< of attend(), since the cache was made
  };

  virtual ~KvCache() = default;

  virtual SeqId create() = 0;
  virtual SeqId fork(SeqId parent) = 0;
  /// Logical positions so far.
  virtual std::int32_t length(SeqId sequence) const = 0;

  /// Makes room for every row's new tokens. Then attend() once a layer, then end().
  virtual void begin(std::span<const Row> rows) = 0;
  /// Stores the new tokens' keys and values and attends, causally. All arrays are packed
  /// [token][head][dim], rows in the order of begin().
  virtual void attend(int layer, const float* queries, const float* keys, const float* values,
                      float* out) = 0;
  virtual void end() = 0;

  virtual Report report() const = 0;
  /// Bits that a key or value element costs over the full coded pages, parameters included; what the
  /// quantizer takes where there is none yet.
  virtual double bits_per_value() const = 0;
};

struct KvShape {
  std::int32_t layers;
  std::int32_t query_heads;
  std::int32_t kv_heads;
  std::int32_t head_dim;
};

enum class ElementOrderName { slot, dim };

/// The largest magnitudes in other text than the one to come; 0: not known.
struct Calibration {
  float key_amax = 0.0f;
  float value_amax = 0.0f;
};

struct KvOptions {
  Policy policy;
  std::int32_t page_tokens = 32;
  ElementOrderName order = ElementOrderName::slot;
  std::int32_t max_sequences = 1;
  std::int32_t max_tokens = 0;  ///< of one sequence
  std::int32_t threads = 1;
  bool plain_path = false;  ///< of attention: the same bits everywhere, slowly
  Calibration calibration{};
};

/// The policies that there are kernels for, without options.
std::vector<std::string> instantiated_parts();

/// Throws std::invalid_argument, with the list, for a policy that there are none for.
void require_kernels(const Policy& policy);

/// Throws std::invalid_argument when the options make no cache or name a policy without kernels,
/// std::runtime_error when no kernel was instantiated for the shape.
std::unique_ptr<KvCache> make_kv_cache(const KvShape& shape, const KvOptions& options);

}  // namespace kvfolia_examples
