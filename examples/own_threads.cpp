// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Decodes over a paged cache on threads that the program brings itself, common/thread_pool.hpp, and holds the
// result against one thread's.

#include <algorithm>
#include <chrono>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <kvfolia/cpu.hpp>
#include <kvfolia/kvfolia.hpp>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/program.hpp"
#include "common/thread_pool.hpp"

namespace {

using namespace kvfolia;

struct Options {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int sequences = 8, context = 4096, steps = 8;
  bool json = false;
};

struct Figures {
  double serial_seconds = 0.0, seconds = 0.0;
  std::int64_t bytes = 0;
};

constexpr int kv_heads = 2, query_heads = 8, head_dim = 64;
constexpr std::int64_t kv_row = kv_heads * head_dim, query_row = query_heads * head_dim;
using Cache = PagedCache<Gqa<head_dim>, Int8>;

std::vector<float> random_values(std::mt19937& random, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = std::normal_distribution<float>()(random);
  return values;
}

void must(Result<> done) {
  if (!done) throw std::runtime_error(done.error().message());
}
template <class T>
T must(Result<T> result) {
  return result ? *std::move(result) : throw std::runtime_error(result.error().message());
}

/// One step's attention on any executor, and how long it took.
template <class Exec>
std::vector<float> attend(const Cache& cache, const Batch& batch, const std::vector<float>& queries,
                          Exec& exec, double& seconds) {
  std::vector<float> out(queries.size());
  const auto view = cache.view(LayerId{0});
  const auto start = std::chrono::steady_clock::now();
  const auto plan = must(cpu::plan_attend(view, batch, {query_heads, exec.concurrency()}));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  AttendArgs args;
  args.queries = {queries.data(), query_row, head_dim};
  args.out = {out.data(), query_row, head_dim};
  must(cpu::attend(view, batch, args, plan, workspace, exec));
  seconds += kvfolia_examples::seconds_since(start);
  return out;
}

Figures decode(const Options& options) {
  kvfolia_examples::ThreadPool pool(options.threads);
  const std::int64_t pages = (options.context + options.steps) / Cache::Layout::page_tokens + 1;
  Cache cache({.shape = {.layers = 1, .kv_heads = kv_heads}, .pages = pages * options.sequences});
  std::vector<SeqId> sequences;
  std::mt19937 random(1);
  Figures figures;
  for (int round = 0; round <= options.steps; ++round) {
    // The first step takes in the contexts, each later one a token of every sequence.
    Step step = cache.begin_step();
    for (int s = 0; s < options.sequences; ++s) {
      if (round == 0) sequences.push_back(must(step.create()));
      must(step.extend(sequences[static_cast<std::size_t>(s)], round == 0 ? options.context : 1));
    }
    const Batch batch = step.commit();
    const auto keys = random_values(random, batch.tokens() * kv_row);
    const auto values = random_values(random, batch.tokens() * kv_row);
    const AppendArgs tokens{{keys.data(), kv_row, head_dim}, {values.data(), kv_row, head_dim}};
    must(cpu::append(cache.view(LayerId{0}), batch, tokens, pool));
    if (round == 0) continue;
    const auto queries = random_values(random, batch.tokens() * query_row);
    const auto expected = attend(cache, batch, queries, cpu::serial, figures.serial_seconds);
    const auto out = attend(cache, batch, queries, pool, figures.seconds);
    if (std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) != 0)
      throw std::runtime_error("the threads' result differs from one thread's: please report this");
  }
  figures.bytes = cache.stats().held * cache.store().page_bytes(0);
  return figures;
}

void print(const Options& options, const Figures& f) {
  const double serial = f.serial_seconds / options.steps, threads = f.seconds / options.steps;
  if (options.json) {
    nlohmann::json json = {{"threads", options.threads}, {"steps", options.steps}, {"same_bits", true}};
    json.update({{"sequences", options.sequences}, {"context", options.context}, {"cache_bytes", f.bytes}});
    json.update({{"serial_seconds_per_step", serial}, {"seconds_per_step", threads}});
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    std::printf("cache      %d sequences of %d tokens, %.2f MiB\n", options.sequences,
                options.context + options.steps, static_cast<double>(f.bytes) / (1 << 20));
    std::printf("1 thread   %.3f ms a step\n%-3d in all %.3f ms a step: %.2f times as fast, the same bits\n",
                serial * 1e3, options.threads, threads * 1e3, serial / threads);
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw std::runtime_error("the output could not be written");
}

int fail(int status, const std::string& message) {
  return std::fprintf(stderr, "own_threads: %s\n", kvfolia_examples::one_line(message).c_str()), status;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Decodes over a paged KV cache on the program's own threads.");
  app.option_defaults()->always_capture_default();
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 1024));
  app.add_option("--sequences", options.sequences)->check(CLI::Range(1, 1024));
  app.add_option("--context", options.context, "tokens of each")->check(CLI::Range(1, 1 << 20));
  app.add_option("--steps", options.steps, "that decode a token of each")->check(CLI::Range(1, 1 << 20));
  app.add_flag("--json", options.json, "print one JSON object instead of text");
  std::signal(SIGPIPE, SIG_IGN);  // a reader that leaves is an error like any other
  try {
    app.parse(argc, argv);
    print(options, decode(options));
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return fail(2, std::string(error.what()) + "; see own_threads --help");
  } catch (const std::bad_alloc&) {
    return fail(1, "there is not enough memory: ask for fewer sequences or a shorter context");
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}
