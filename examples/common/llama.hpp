// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A Llama-family model: embeddings, rotary attention through a KvCache, gated feed-forward layers.

#include <cstdint>
#include <Eigen/Core>
#include <initializer_list>
#include <span>
#include <vector>

#include "common/gguf.hpp"
#include "common/kv_cache.hpp"
#include "common/tokenizer.hpp"

namespace kvfolia_examples {

/// [row][column], one token a row.
using Activations = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

class Llama {
 public:
  struct Row {
    SeqId sequence;
    std::span<const TokenId> tokens;
  };

  /// Reads weights from the file as they are needed: it must stay open. Throws std::runtime_error
  /// when the file is of another architecture or its tensors have other shapes.
  Llama(const GgufFile& file, int threads);

  const KvShape& kv_shape() const { return kv_shape_; }
  std::int32_t context_length() const { return context_length_; }
  std::int32_t vocabulary() const { return static_cast<std::int32_t>(embedding_->rows()); }

  /// Runs the rows' new tokens through the model and the cache; gives the logits behind each row's
  /// last token, [row][vocabulary]. Rows must not be empty.
  Activations forward(std::span<const Row> rows, KvCache& cache) const;
  /// The same, with the logits behind every token, [token][vocabulary].
  Activations forward_all(std::span<const Row> rows, KvCache& cache) const;

 private:
  struct Layer {
    const GgufTensor* attention_norm;
    const GgufTensor* queries;
    const GgufTensor* keys;
    const GgufTensor* values;
    const GgufTensor* attention_out;
    const GgufTensor* ffn_norm;
    const GgufTensor* gate;
    const GgufTensor* up;
    const GgufTensor* down;
  };

  /// Rotary position embedding on neighbouring pairs (arXiv:2104.09864): [token][pair of a head].
  struct Rotation {
    Activations cosines;
    Activations sines;
  };

  /// The last layer's output for every token.
  Activations hidden(std::span<const Row> rows, KvCache& cache) const;
  struct Product {
    const GgufTensor* weight;
    Activations* out;
  };

  // What is written is resized where it has another size.

  void normalize(const Activations& x, const GgufTensor& weight, Activations& out) const;
  /// x times each of the weights: together, because starting threads takes as long as a small product.
  void multiply(const Activations& x, std::initializer_list<Product> products) const;
  Activations logits(const Activations& x) const;
  Rotation rotation(const std::vector<std::int32_t>& positions) const;
  void rotate(Activations& x, const Rotation& rotation) const;

  int threads_;
  KvShape kv_shape_{};
  std::int32_t context_length_ = 0;
  float norm_epsilon_ = 0.0f;
  double rope_base_ = 0.0;
  const GgufTensor* embedding_ = nullptr;
  const GgufTensor* output_norm_ = nullptr;
  const GgufTensor* output_ = nullptr;
  std::vector<Layer> layers_;
};

}  // namespace kvfolia_examples
