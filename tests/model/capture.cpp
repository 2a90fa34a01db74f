// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Writes tests/data/smollm2.fp16: queries, keys and values of a real model on real prose, as attention
// sees them. `capture MODEL.gguf PROSE.txt OUT` runs the prose through the engine of examples/ with a
// float32 cache. See tests/support/captured.hpp for the file's order.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/gguf.hpp"
#include "common/kv_cache.hpp"
#include "common/llama.hpp"
#include "common/tokenizer.hpp"
#include "kvfolia/core/fp16.hpp"
#include "support/captured.hpp"

namespace {

using namespace kvfolia_examples;

/// Forwards everything, and keeps what the captured layers are given.
class Recorder final : public KvCache {
 public:
  struct Layer {
    std::vector<float> queries, keys, values;
  };

  explicit Recorder(const KvShape& shape, const KvOptions& options)
      : shape_(shape), cache_(make_kv_cache(shape, options)) {}

  SeqId create() override { return cache_->create(); }
  SeqId fork(SeqId parent) override { return cache_->fork(parent); }
  std::int32_t length(SeqId sequence) const override { return cache_->length(sequence); }
  void begin(std::span<const Row> rows) override {
    tokens_ = 0;
    for (const Row& row : rows) tokens_ += row.tokens;
    cache_->begin(rows);
  }
  void attend(int layer, const float* queries, const float* keys, const float* values, float* out) override {
    const auto copy = [&](const float* from, int heads) {
      return std::vector<float>(from, from + std::int64_t{tokens_} * heads * shape_.head_dim);
    };
    layers[layer] = {copy(queries, shape_.query_heads), copy(keys, shape_.kv_heads),
                     copy(values, shape_.kv_heads)};
    cache_->attend(layer, queries, keys, values, out);
  }
  void end() override { cache_->end(); }
  Report report() const override { return cache_->report(); }
  double bits_per_value() const override { return cache_->bits_per_value(); }

  std::map<int, Layer> layers;

 private:
  KvShape shape_;
  std::unique_ptr<KvCache> cache_;
  std::int64_t tokens_ = 0;
};

void write_rows(std::ostream& to, const std::vector<float>& from, int first, int last, int heads, int head,
                int dims) {
  for (int token = first; token < last; ++token)
    for (int d = 0; d < dims; ++d) {
      const kvfolia::fp16 value(from[static_cast<std::size_t>((token * heads + head) * dims + d)]);
      to.put(static_cast<char>(value.bits & 0xff)).put(static_cast<char>(value.bits >> 8));
    }
}

void capture(const char* model_path, const char* prose_path, const char* out_path) {
  using namespace kvfolia_tests;
  const GgufFile file = GgufFile::open(model_path);
  const Llama model(file, 1);
  std::ifstream prose(prose_path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(prose), {}};
  std::vector<TokenId> tokens = Tokenizer(file).encode(text);
  if (tokens.size() < captured_tokens) throw std::runtime_error("the prose is too short");
  tokens.resize(captured_tokens);

  const KvShape shape = model.kv_shape();
  Recorder recorder(shape, {.policy = parse_policy("fp32"), .max_tokens = captured_tokens});
  const Llama::Row row{recorder.create(), tokens};
  model.forward({&row, 1}, recorder);

  std::ofstream out(out_path, std::ios::binary);
  const int group = shape.query_heads / shape.kv_heads;
  for (const int layer : captured_layers)
    for (const int head : captured_heads) {
      const Recorder::Layer& from = recorder.layers.at(layer);
      write_rows(out, from.keys, 0, captured_tokens, shape.kv_heads, head, captured_dims);
      write_rows(out, from.values, 0, captured_tokens, shape.kv_heads, head, captured_dims);
      for (int q = 0; q < captured_group; ++q)
        write_rows(out, from.queries, captured_tokens - captured_queries, captured_tokens, shape.query_heads,
                   head * group + q, captured_dims);
    }
  if (!out.flush()) throw std::runtime_error("the output cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: capture MODEL.gguf PROSE.txt OUT\n", stderr);
    return 2;
  }
  try {
    capture(argv[1], argv[2], argv[3]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "capture: %s\n", error.what());
    return 1;
  }
}
