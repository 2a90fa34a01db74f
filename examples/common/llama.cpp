// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Weights stay as the file has them, 4 to 8 bits for the models that one runs at home, and are used exactly.
// Few tokens are multiplied straight from the file's blocks: reading them is what a decoding step takes its
// time for, and a core gets through 17 Q4_1 weights a nanosecond but 5 in float32. For many tokens a panel of
// rows is widened to float right before Eigen multiplies by it.

#include "common/llama.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/matvec.hpp"

namespace kvfolia_examples {
namespace {

// Rows of a weight that a thread takes at once, and tokens that it multiplies a widened panel by: Eigen
// copies both factors into an order of its own, and the copies should fit a core's cache.
constexpr std::int64_t direct_rows = 32;
constexpr std::int64_t widened_rows = 96;
constexpr Eigen::Index widened_tokens = 128;

/// f(row) for every row, on several threads where there is enough to do.
template <class F>
void for_rows(Eigen::Index rows, int threads, F f) {
#pragma omp parallel for num_threads(threads) if (rows > matvec_tokens)
  for (Eigen::Index row = 0; row < rows; ++row) f(row);
}

void require_shape(const GgufFile& file, const GgufTensor& tensor, std::vector<std::int64_t> shape) {
  if (tensor.shape == shape) return;
  const auto text = [](const std::vector<std::int64_t>& s) {
    std::string t;
    for (const std::int64_t n : s) t += (t.empty() ? "" : " x ") + std::to_string(n);
    return t;
  };
  throw std::runtime_error(file.path() + ": the tensor '" + tensor.name + "' is " + text(tensor.shape) +
                           ", not " + text(shape));
}

std::int32_t positive(const GgufFile& file, const std::string& key) {
  const std::uint32_t value = file.get_u32(key);
  if (value == 0 || value > (1u << 24))
    throw std::runtime_error(file.path() + ": the key '" + key + "' is out of range");
  return static_cast<std::int32_t>(value);
}

}  // namespace

Llama::Llama(const GgufFile& file, int threads) : threads_(threads) {
  if (const std::string_view name = file.get_string("general.architecture"); name != "llama")
    throw std::runtime_error(file.path() + ": the architecture is '" + std::string(name) +
                             "', only llama is supported");
  const std::int32_t width = positive(file, "llama.embedding_length");
  const std::int32_t ffn = positive(file, "llama.feed_forward_length");
  kv_shape_.layers = positive(file, "llama.block_count");
  kv_shape_.query_heads = positive(file, "llama.attention.head_count");
  kv_shape_.kv_heads = file.has("llama.attention.head_count_kv")
                           ? positive(file, "llama.attention.head_count_kv")
                           : kv_shape_.query_heads;
  if (width % kv_shape_.query_heads != 0 || kv_shape_.query_heads % kv_shape_.kv_heads != 0)
    throw std::runtime_error(file.path() + ": the head counts do not divide the width and each other");
  kv_shape_.head_dim = file.has("llama.attention.key_length") ? positive(file, "llama.attention.key_length")
                                                              : width / kv_shape_.query_heads;
  const std::int32_t rotated = file.has("llama.rope.dimension_count")
                                   ? positive(file, "llama.rope.dimension_count")
                                   : kv_shape_.head_dim;
  if (rotated != kv_shape_.head_dim || rotated % 2 != 0)
    throw std::runtime_error(file.path() + ": only rotary embeddings of the whole head are supported");
  if (file.has("llama.rope.scaling.type") && file.get_string("llama.rope.scaling.type") != "none")
    throw std::runtime_error(file.path() + ": scaled rotary embeddings are not supported");
  if (file.find_tensor("rope_freqs.weight"))
    throw std::runtime_error(file.path() + ": rotary embeddings with factors are not supported");
  context_length_ = positive(file, "llama.context_length");
  norm_epsilon_ = file.get_f32("llama.attention.layer_norm_rms_epsilon");
  rope_base_ = file.has("llama.rope.freq_base") ? double{file.get_f32("llama.rope.freq_base")} : 10000.0;

  embedding_ = &file.tensor("token_embd.weight");
  require_shape(file, *embedding_, {width, embedding_->rows()});
  output_norm_ = &file.tensor("output_norm.weight");
  require_shape(file, *output_norm_, {width});
  output_ = file.find_tensor("output.weight");
  if (!output_) output_ = embedding_;  // tied
  require_shape(file, *output_, {width, embedding_->rows()});

  const std::int64_t query_width = std::int64_t{kv_shape_.query_heads} * kv_shape_.head_dim;
  const std::int64_t kv_width = std::int64_t{kv_shape_.kv_heads} * kv_shape_.head_dim;
  for (int i = 0; i < kv_shape_.layers; ++i) {
    const auto get = [&](const char* name, std::vector<std::int64_t> shape) {
      const GgufTensor& tensor = file.tensor("blk." + std::to_string(i) + "." + name + ".weight");
      require_shape(file, tensor, std::move(shape));
      return &tensor;
    };
    if (file.find_tensor("blk." + std::to_string(i) + ".attn_q.bias"))
      throw std::runtime_error(file.path() + ": attention biases are not supported");
    layers_.push_back(
        {get("attn_norm", {width}), get("attn_q", {width, query_width}), get("attn_k", {width, kv_width}),
         get("attn_v", {width, kv_width}), get("attn_output", {query_width, width}), get("ffn_norm", {width}),
         get("ffn_gate", {width, ffn}), get("ffn_up", {width, ffn}), get("ffn_down", {ffn, width})});
  }
}

void Llama::normalize(const Activations& x, const GgufTensor& weight, Activations& out) const {
  Eigen::RowVectorXf scale(x.cols());
  weight.dequantize(0, scale.data());
  out.resize(x.rows(), x.cols());
  for_rows(x.rows(), threads_, [&](Eigen::Index row) {
    const float mean_square = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    out.row(row) = (x.row(row) / std::sqrt(mean_square + norm_epsilon_)).cwiseProduct(scale);
  });
}

void Llama::multiply(const Activations& x, std::initializer_list<Product> products) const {
  struct Panel {
    Product product;
    std::int64_t begin, rows;
    bool is_direct;
  };
  std::vector<Panel> panels;
  for (const Product& product : products) {
    const std::int64_t rows = product.weight->rows();
    product.out->resize(x.rows(), rows);
    const bool is_direct = x.rows() <= matvec_tokens && has_matvec(*product.weight);
    const std::int64_t step = is_direct ? direct_rows : widened_rows;
    for (std::int64_t begin = 0; begin < rows; begin += step)
      panels.push_back({product, begin, std::min(step, rows - begin), is_direct});
  }
#pragma omp parallel num_threads(threads_)
  {
    Activations widened;
#pragma omp for schedule(dynamic)
    for (const auto& [product, begin, rows, is_direct] : panels) {
      const auto& [weight, out] = product;
      if (is_direct) {
        matvec(*weight, begin, begin + rows, {x.data(), x.rows(), x.cols(), out->data(), out->cols()});
        continue;
      }
      widened.resize(rows, weight->cols());
      for (std::int64_t r = 0; r < rows; ++r) weight->dequantize(begin + r, widened.row(r).data());
      for (Eigen::Index token = 0; token < x.rows(); token += widened_tokens) {
        const Eigen::Index tokens = std::min(widened_tokens, x.rows() - token);
        out->block(token, begin, tokens, rows).noalias() = x.middleRows(token, tokens) * widened.transpose();
      }
    }
  }
}

Activations Llama::logits(const Activations& x) const {
  Activations normal, y;
  normalize(x, *output_norm_, normal);
  multiply(normal, {{output_, &y}});
  return y;
}

Llama::Rotation Llama::rotation(const std::vector<std::int32_t>& positions) const {
  const int pairs = kv_shape_.head_dim / 2;
  Rotation rotation{Activations(positions.size(), pairs), Activations(positions.size(), pairs)};
  for (int pair = 0; pair < pairs; ++pair) {
    const double frequency = std::pow(rope_base_, -static_cast<double>(pair) / pairs);
    for (std::size_t token = 0; token < positions.size(); ++token) {
      const auto row = static_cast<Eigen::Index>(token);
      rotation.cosines(row, pair) = static_cast<float>(std::cos(positions[token] * frequency));
      rotation.sines(row, pair) = static_cast<float>(std::sin(positions[token] * frequency));
    }
  }
  return rotation;
}

void Llama::rotate(Activations& x, const Rotation& rotation) const {
  const Eigen::Index pairs = rotation.cosines.cols();
  for_rows(x.rows(), threads_, [&](Eigen::Index token) {
    for (Eigen::Index head = 0; head < x.cols(); head += 2 * pairs)
      for (Eigen::Index i = 0; i < pairs; ++i) {
        const float cosine = rotation.cosines(token, i), sine = rotation.sines(token, i);
        float& first = x(token, head + 2 * i);
        float& second = x(token, head + 2 * i + 1);
        const float a = first, b = second;
        first = a * cosine - b * sine;
        second = a * sine + b * cosine;
      }
  });
}

Activations Llama::hidden(std::span<const Row> rows, KvCache& cache) const {
  std::vector<KvCache::Row> kv_rows;
  std::vector<std::int32_t> positions;
  std::vector<TokenId> tokens;
  for (const Row& row : rows) {
    kv_rows.push_back({row.sequence, static_cast<std::int32_t>(row.tokens.size())});
    std::int32_t position = cache.length(row.sequence);
    for (const TokenId token : row.tokens) {
      positions.push_back(position++);
      tokens.push_back(token);
    }
  }
  const auto count = static_cast<Eigen::Index>(tokens.size());

  Activations x(count, embedding_->cols());
  for (Eigen::Index i = 0; i < count; ++i)
    embedding_->dequantize(tokens[static_cast<std::size_t>(i)], x.row(i).data());

  const Rotation turns = rotation(positions);
  cache.begin(kv_rows);
  Activations normal, queries, keys, values, gate, up, added;
  Activations attended(count, std::int64_t{kv_shape_.query_heads} * kv_shape_.head_dim);
  for (int i = 0; i < kv_shape_.layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    normalize(x, *layer.attention_norm, normal);
    multiply(normal, {{layer.queries, &queries}, {layer.keys, &keys}, {layer.values, &values}});
    rotate(queries, turns);
    rotate(keys, turns);
    cache.attend(i, queries.data(), keys.data(), values.data(), attended.data());
    multiply(attended, {{layer.attention_out, &added}});
    x += added;

    normalize(x, *layer.ffn_norm, normal);
    multiply(normal, {{layer.gate, &gate}, {layer.up, &up}});
    for_rows(count, threads_, [&](Eigen::Index row) {
      const auto g = gate.row(row).array();
      gate.row(row) = (g / (1.0f + (-g).exp()) * up.row(row).array()).matrix();
    });
    multiply(gate, {{layer.down, &added}});
    x += added;
  }
  cache.end();

  return x;
}

Activations Llama::forward(std::span<const Row> rows, KvCache& cache) const {
  const Activations x = hidden(rows, cache);
  Activations last(static_cast<Eigen::Index>(rows.size()), x.cols());
  Eigen::Index tokens = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    tokens += static_cast<Eigen::Index>(rows[i].tokens.size());
    last.row(static_cast<Eigen::Index>(i)) = x.row(tokens - 1);
  }
  return logits(last);
}

Activations Llama::forward_all(std::span<const Row> rows, KvCache& cache) const {
  return logits(hidden(rows, cache));
}

}  // namespace kvfolia_examples
