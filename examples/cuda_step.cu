// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Steps of an engine on a GPU: sequences of different lengths, several layers, an Int8 cache in the device's
// memory. Prompts are appended; then every step's copies, appends and attention are one CUDA graph, captured
// once. The last step is held against attention in double precision over the same pages.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvfolia/cuda.cuh>
#include <kvfolia/kvfolia.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_step.hpp"

namespace {

using namespace kvfolia;

using namespace kvfolia_examples;

constexpr int layers = 4, steps = 24;
constexpr int prompts[] = {300, 17, 1000, 1};
constexpr int rows = sizeof(prompts) / sizeof(prompts[0]), most_tokens = 1000;
using Store = ResourceStore<cuda::DeviceMemory>;
using Cache = PagedCache<StepLayout, Int8, KeepAll, All, Store>;

void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
void must(const Result<>& done) {
  if (!done) throw std::runtime_error(done.error().message());
}
template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  return *std::move(result);
}

/// Numbers of a model's layers on the device: here they are random, as the host makes them.
template <class T>
struct DeviceRows {
  T* data = nullptr;
  std::size_t count;
  explicit DeviceRows(std::size_t n) : count(n) { must(cudaMalloc(&data, n * sizeof(T)), "cudaMalloc"); }
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;
  ~DeviceRows() { cudaFree(data); }

  void set(const std::vector<T>& host) {
    must(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> get() const {
    std::vector<T> host(count);
    must(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

std::vector<fp16> random_rows(std::mt19937& random, std::size_t count) {
  std::vector<fp16> values;
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) values.push_back(fp16(normal(random)));
  return values;
}

struct Figures {
  int tokens = 0;
  double worst_error = 0.0, step_microseconds = 0.0;
  std::int64_t bytes = 0, bytes_as_fp16 = 0;
};

class Engine {
 public:
  Engine()
      : config_{.shape = {layers, kv_heads, dynamic}, .pages = 256},
        cache_(config_, must(Store::make(Cache::store_spec(config_), memory_, nullptr))),
        uploads_(must(Uploads<cuda::DeviceMemory>::make(
            {.rows = rows, .tokens = 2 * most_tokens, .entries = 256, .copies = rows, .in_flight = 1},
            memory_, nullptr))),
        keys_(std::size_t{layers} * 2 * most_tokens * kv_row),
        values_(keys_.count),
        queries_(std::size_t{layers} * rows * query_row),
        out_(queries_.count) {
    must(cudaStreamCreate(&stream_), "cudaStreamCreate");
  }
  ~Engine() {
    if (graph_) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  Figures run() {
    Figures figures;
    Step step = cache_.begin_step();
    for (int row = 0; row < rows; ++row) {
      sequences_[row] = must(step.create());
      must(step.extend(sequences_[row], prompts[row]));
    }
    figures.tokens += prefill(step.commit());
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < steps; ++i) {
      Step next = cache_.begin_step();
      for (const SeqId id : sequences_) must(next.extend(id, 1));
      must(uploads_.wait());  // for the step before: one is in flight
      const auto batch = must(uploads_.upload(next.commit(), stream_));
      new_rows(rows);
      queries_.set(random_rows(random_, queries_.count));
      if (!graph_) capture(batch);
      must(cudaEventRecord(begin, stream_), "cudaEventRecord");
      must(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
      must(cudaEventRecord(end, stream_), "cudaEventRecord");
      must(cudaStreamSynchronize(stream_), "a step");
      float milliseconds = 0.0f;
      must(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
      figures.step_microseconds = 1e3 * milliseconds;
      figures.tokens += rows;
      if (i + 1 == steps) figures.worst_error = error(batch);
    }
    const FormatStats stats = cache_.stats();
    figures.bytes = stats.bytes_held();
    figures.bytes_as_fp16 = stats.held * 16 * layers * kv_row * 2 * 2;
    return figures;
  }

 private:
  void new_rows(int tokens) {
    const auto count = static_cast<std::size_t>(tokens) * layers * kv_row;
    keys_.set(random_rows(random_, count));
    values_.set(random_rows(random_, count));
  }
  AppendArgs new_tokens(int layer, int tokens) const {
    const std::int64_t first = std::int64_t{layer} * tokens * kv_row;
    return {{keys_.data + first, kv_row, head_dim}, {values_.data + first, kv_row, head_dim}, {}};
  }
  AttendArgs attention(int layer) const {
    const std::int64_t first = std::int64_t{layer} * rows * query_row;
    AttendArgs args;
    args.queries = {queries_.data + first, query_row, head_dim};
    args.out = {out_.data + first, query_row, head_dim};
    return args;
  }

  int prefill(Batch prompt) {
    const auto batch = must(uploads_.upload(std::move(prompt), stream_));
    new_rows(batch.tokens());
    for (int layer = 0; layer < layers; ++layer)
      must(cuda::append(cache_.view(LayerId{layer}), batch, new_tokens(layer, batch.tokens()),
                        {.tokens = batch.tokens()}, stream_));
    must(cudaStreamSynchronize(stream_), "the prompts");
    return batch.tokens();
  }

  /// What does not change from step to step: pointers, and how much there can be.
  void capture(const UploadedBatch<cuda::DeviceMemory>& batch) {
    const auto plan = must(cuda::plan_attend(
        cache_.view(LayerId{0}),
        {.query_heads = query_heads, .rows = rows, .queries = rows, .row_slots = most_tokens + steps}));
    workspace_.emplace(plan.workspace_bytes());
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    must(cache_.store().copy(batch.padded_copies(), stream_));
    for (int layer = 0; layer < layers; ++layer) {
      const auto view = cache_.view(LayerId{layer});
      must(cuda::append(view, batch.padded_view(), new_tokens(layer, rows), {.tokens = rows}, stream_));
      must(cuda::attend(view, batch.padded_view(), attention(layer), plan,
                        {workspace_->data, workspace_->count}, stream_));
    }
    cudaGraph_t graph = nullptr;
    must(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

  /// The largest relative error of a layer, over pages that are brought back.
  double error(const UploadedBatch<cuda::DeviceMemory>& batch) const {
    const PageSlices& slices = cache_.store().view().formats[0];
    std::vector<std::byte> pages(static_cast<std::size_t>(slices.slice_bytes * slices.pages * layers));
    must(cudaMemcpy(pages.data(), slices.base, pages.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const std::vector<fp16> out = out_.get(), queries = queries_.get();
    double worst = 0.0;
    for (int layer = 0; layer < layers; ++layer) {
      auto view = cache_.view(LayerId{layer});
      FormatView& format = view.formats[0];
      for (PlaneView* plane : {&format.keys, &format.values, &format.key_params, &format.value_params})
        plane->base = pages.data() + (plane->base - slices.base);
      const std::size_t first = std::size_t{static_cast<unsigned>(layer)} * rows * query_row;
      const double relative =
          must(step_error(view, batch.batch(), queries.data() + first, out.data() + first));
      if (!(relative <= worst)) worst = relative;
    }
    return worst;
  }

  CacheConfig config_;
  cuda::DeviceMemory memory_;
  Cache cache_;
  Uploads<cuda::DeviceMemory> uploads_;
  std::mt19937 random_{1};
  SeqId sequences_[rows] = {};
  DeviceRows<fp16> keys_, values_, queries_, out_;
  std::optional<DeviceRows<std::byte>> workspace_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

constexpr const char* usage =
    "usage: cuda_step [--json]\n"
    "Runs steps of an engine on a GPU and holds the last one against double precision.\n";

}  // namespace

int main(int argc, char** argv) {
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help" || argument == "-h") return std::fputs(usage, stdout), 0;
    if (argument != "--json")
      return std::fprintf(stderr, "cuda_step: no option %s: try --help\n", argv[i]), 2;
    json = true;
  }
  try {
    int devices = 0;
    const cudaError_t asked = cudaGetDeviceCount(&devices);
    if (asked == cudaErrorNoDevice || asked == cudaErrorInsufficientDriver ||
        (asked == cudaSuccess && devices == 0))
      throw std::runtime_error(
          "there is no GPU: run it where there is one of compute capability 8.0 or later");
    must(asked, "cudaGetDeviceCount");
    const Figures f = Engine().run();
    std::printf(
        json ? "{\"tokens\": %d, \"step_us\": %.1f, \"error\": %.3g, \"bytes\": %lld, \"bytes_fp16\": %lld}\n"
             : "%d tokens stored; the last step took %.1f us; relative error %.3g;\n"
               "%lld bytes of pages are held, %lld they would be as fp16\n",
        f.tokens, f.step_microseconds, f.worst_error, static_cast<long long>(f.bytes),
        static_cast<long long>(f.bytes_as_fp16));
    if (!(f.worst_error <= 1e-3))
      throw std::runtime_error("results differ from double precision by more than 1e-3");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_step: %s\n", error.what());
    return 1;
  }
}
