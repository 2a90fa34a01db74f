// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// ggml's flash attention over the same numbers, each copy's keys and values [batch][head][key][dim]: the
// order that it reads fastest.

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include <ggml-cpu.h>
#include <ggml.h>

#include "attend_cases.hpp"
#include "attend_parts.hpp"

namespace kvfolia_bench {
namespace {

template <class T, void (*Free)(T*)>
struct Freeing {
  void operator()(T* object) const { Free(object); }
};

class GgmlAttention final : public Attention {
 public:
  GgmlAttention(const AttendCase& c, int dims, ggml_type type, HugeMemory& memory, std::int64_t cold_bytes)
      : case_(c),
        dims_(dims),
        type_(type),
        row_bytes_(ggml_row_size(type, dims)),
        plane_bytes_(static_cast<std::int64_t>(row_bytes_) * c.tokens() * c.kv_heads),
        copies_(cold_copies(bytes(), cold_bytes)),
        data_(memory.take(copies_ * bytes())) {
    fill();
    for (std::int64_t copy = 1; copy < copies_; ++copy)
      std::memcpy(data_ + copy * bytes(), data_, static_cast<std::size_t>(bytes()));
    make_queries();
    make_mask();
    const auto n = static_cast<std::size_t>(copies_);
    constexpr std::size_t graph_nodes = 8;
    context_.reset(
        ggml_init({n * (4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(graph_nodes, false) + 1024) +
                       8 * ggml_tensor_overhead(),
                   nullptr, true}));
    ggml_threadpool_params threads = ggml_threadpool_params_default(c.threads);
    pool_.reset(ggml_threadpool_new(&threads));
    ggml_tensor* queries =
        ggml_new_tensor_4d(context_.get(), GGML_TYPE_F32, dims, c.queries, c.query_heads, c.batch);
    queries->data = queries_.data();
    ggml_tensor* mask = nullptr;
    if (!mask_.empty()) {
      mask = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, c.keys, mask_rows());
      mask->data = mask_.data();
    }
    for (std::int64_t copy = 0; copy < copies_; ++copy) {
      const auto plane = [&](std::int64_t offset) {
        ggml_tensor* tensor = ggml_new_tensor_4d(context_.get(), type, dims, c.keys, c.kv_heads, c.batch);
        tensor->data = data_ + copy * bytes() + offset;
        return tensor;
      };
      ggml_tensor* keys = plane(0);
      ggml_tensor* values = plane(plane_bytes_);
      ggml_tensor* out = ggml_flash_attn_ext(context_.get(), queries, keys, values, mask,
                                             1.0f / std::sqrt(static_cast<float>(dims)), 0.0f, 0.0f);
      out->data = out_.data();
      graphs_.push_back(ggml_new_graph_custom(context_.get(), graph_nodes, false));
      ggml_build_forward_expand(graphs_.back(), out);
      plans_.push_back(ggml_graph_plan(graphs_.back(), c.threads, pool_.get()));
      workspace_.resize(std::max(workspace_.size(), plans_.back().work_size));
    }
    for (ggml_cplan& plan : plans_) plan.work_data = workspace_.data();
  }

  std::int64_t copies() const override { return copies_; }
  std::int64_t bytes() const override { return 2 * plane_bytes_; }

  bool run(std::int64_t copy) override {
    const auto i = static_cast<std::size_t>(copy);
    return ggml_graph_compute(graphs_[i], &plans_[i]) == GGML_STATUS_SUCCESS;
  }

  double error() override {
    double worst = 0.0;
    for (const auto& [row, head] : {std::pair{0, 0}, std::pair{case_.batch - 1, case_.query_heads - 1}}) {
      const std::int64_t query = query_row(row, case_.queries - 1, head) * dims_;
      const std::int64_t token = std::int64_t{row + 1} * case_.queries - 1;
      const std::int64_t out = (token * case_.query_heads + head) * dims_;
      const int kv_head = head / (case_.query_heads / case_.kv_heads);
      worst = std::max(worst, attention_error(queries_.data() + query, out_.data() + out, case_.keys, dims_,
                                              [&, row = row](int t, float* key, float* value) {
                                                const std::byte* from = data_ + offset(row, kv_head, t);
                                                decode(from, key);
                                                decode(from + plane_bytes_, value);
                                              }));
    }
    return worst;
  }

 private:
  /// Where a vector begins in its plane.
  std::int64_t offset(int row, int kv_head, int token) const {
    return ((std::int64_t{row} * case_.kv_heads + kv_head) * case_.keys + token) *
           static_cast<std::int64_t>(row_bytes_);
  }
  std::int64_t query_row(int row, int query, int head) const {
    return (std::int64_t{row} * case_.query_heads + head) * case_.queries + query;
  }
  std::int64_t mask_rows() const { return (case_.queries + 63) / 64 * 64; }

  void encode(const float* from, std::byte* to) const {
    if (type_ == GGML_TYPE_F32)
      std::memcpy(to, from, row_bytes_);
    else
      ggml_quantize_chunk(type_, from, to, 0, 1, dims_, nullptr);
  }
  void decode(const std::byte* from, float* to) const {
    if (type_ == GGML_TYPE_F32)
      std::memcpy(to, from, row_bytes_);
    else
      ggml_get_type_traits(type_)->to_float(from, to, dims_);
  }

  void fill() {
    for (int row = 0; row < case_.batch; ++row)
      for (int t = 0; t < case_.keys; ++t) {
        const std::int64_t token = std::int64_t{row} * case_.keys + t;
        const float* key = inputs().token(Gaussian::keys, token);
        const float* value = inputs().token(Gaussian::values, token);
        for (int head = 0; head < case_.kv_heads; ++head) {
          std::byte* to = data_ + offset(row, head, t);
          encode(key + head * dims_, to);
          encode(value + head * dims_, to + plane_bytes_);
        }
      }
  }

  /// From [token][head][dim] to [batch][head][query][dim].
  void make_queries() {
    const auto count = static_cast<std::size_t>(case_.query_tokens() * case_.query_heads * dims_);
    queries_.resize(count);
    out_.resize(count);
    for (int row = 0; row < case_.batch; ++row)
      for (int query = 0; query < case_.queries; ++query) {
        const float* from = inputs().token(Gaussian::queries, std::int64_t{row} * case_.queries + query);
        for (int head = 0; head < case_.query_heads; ++head)
          std::copy_n(from + head * dims_, dims_, queries_.data() + query_row(row, query, head) * dims_);
      }
  }

  void make_mask() {
    if (case_.queries == 1) return;
    const ggml_fp16_t seen = ggml_fp32_to_fp16(0.0f), unseen = ggml_fp32_to_fp16(-INFINITY);
    for (std::int64_t query = 0; query < mask_rows(); ++query)
      for (int key = 0; key < case_.keys; ++key)
        mask_.push_back(key <= case_.keys - case_.queries + query ? seen : unseen);
  }

  AttendCase case_;
  int dims_;
  ggml_type type_;
  std::size_t row_bytes_;
  std::int64_t plane_bytes_;
  std::int64_t copies_;
  std::byte* data_;
  std::vector<float> queries_, out_;
  std::vector<ggml_fp16_t> mask_;
  std::vector<std::uint8_t> workspace_;
  std::unique_ptr<ggml_context, Freeing<ggml_context, ggml_free>> context_;
  std::unique_ptr<ggml_threadpool, Freeing<ggml_threadpool, ggml_threadpool_free>> pool_;
  std::vector<ggml_cgraph*> graphs_;
  std::vector<ggml_cplan> plans_;
};

void add_type(Bench& bench, const std::string& name, ggml_type type, const Cases& cases, int dims = 128) {
  // It sums in fp16: off by 0.035 over 65,536 keys.
  constexpr double allowed = 0.1;
  for (const AttendCase& c : cases)
    bench.add("ggml/" + name + c.name(dims), c, dims, allowed,
              [c, dims, type](HugeMemory& memory, std::int64_t cold_bytes) {
                return std::make_unique<GgmlAttention>(c, dims, type, memory, cold_bytes);
              });
}

}  // namespace

void add_ggml(Bench& bench) {
  ggml_cpu_init();
  const Cases lengths = decode_cases() + prefill_cases();
  const Cases shapes = lengths + head_cases() + batch_cases();
  add_type(bench, "fp32", GGML_TYPE_F32, lengths);
  add_type(bench, "fp16", GGML_TYPE_F16, shapes);
  add_type(bench, "bf16", GGML_TYPE_BF16, lengths);
  add_type(bench, "q8_0", GGML_TYPE_Q8_0, shapes);
  add_type(bench, "q4_0", GGML_TYPE_Q4_0, shapes);
  for (const int dims : {64, 80, 96, 256}) add_type(bench, "fp16", GGML_TYPE_F16, {{.keys = 16384}}, dims);
}

}  // namespace kvfolia_bench
