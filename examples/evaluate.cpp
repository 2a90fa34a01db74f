// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Measures what cache policies cost a Llama-family model: perplexity and divergence from a float32 cache.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/calibration.hpp"
#include "common/figures.hpp"
#include "common/gguf.hpp"
#include "common/kv_cache.hpp"
#include "common/llama.hpp"
#include "common/policy.hpp"
#include "common/policy_list.hpp"
#include "common/program.hpp"
#include "common/prose.hpp"
#include "common/tokenizer.hpp"

namespace {

using namespace kvfolia_examples;

constexpr const char* default_policies =
    "fp16,bf16,int8,int8+sink:1,int8-g32,int8+centered,int8+centered+sink:1,int8+rotated,fp8,"
    "int8+centered/int4-g32+rotated+sink:1,int4-g32+centered+rotated+sink:1,kivi4,kivi4+sink:1,int4-g32,"
    "nvfp4,mxfp4";

constexpr std::int32_t chunk = 256;  ///< tokens a forward pass; bounds the memory of logits

struct Options {
  std::string model, text, policies = default_policies, path = "fast", csv, svg;
  int tokens = 8192, context = 4096, page_tokens = 32, threads = 0;
  bool json = false;
  bool tokens_given = false, context_given = false;
};

/// A text's tokens: those that are scored, and some that stand in front of them.
struct Sample {
  std::string name;
  std::vector<TokenId> scored;
  std::vector<TokenId> calibration;
};

void say(const std::string& message) { std::fprintf(stderr, "evaluate: %s\n", one_line(message).c_str()); }

/// A file to be written at the end, but refused at the beginning.
class OutputFile {
 public:
  explicit OutputFile(std::string path) : path_(std::move(path)) {
    // Appending nothing keeps what is there in case the measurement fails.
    if (!path_.empty() && !std::ofstream(path_, std::ios::app)) fail();
  }
  void write(const std::string& text) const {
    std::ofstream file(path_, std::ios::binary);
    if (!file.write(text.data(), static_cast<std::streamsize>(text.size())).flush()) fail();
  }
  bool is_wanted() const { return !path_.empty(); }

 private:
  [[noreturn]] void fail() const { throw std::runtime_error(path_ + ": cannot be written"); }
  std::string path_;
};

/// A bar on a terminal, nothing elsewhere.
class Progress {
 public:
  explicit Progress(std::int64_t total) : on_(::isatty(STDERR_FILENO) != 0), total_(total) {}
  ~Progress() {
    if (on_) std::fprintf(stderr, "\r\033[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(std::int64_t tokens, const std::string& policy) {
    done_ += tokens;
    if (!on_) return;
    const double fraction = static_cast<double>(done_) / static_cast<double>(total_);
    std::string bar(30, '.');
    std::fill_n(bar.begin(), static_cast<std::ptrdiff_t>(fraction * 30.0), '#');
    std::fprintf(stderr, "\r\033[K[%s] %3.0f%%, %.0f s left, %s", bar.c_str(), 100.0 * fraction,
                 seconds_since(start_) * (1.0 / fraction - 1.0), policy.c_str());
  }

 private:
  bool on_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The reference first, then what was asked for, each once.
std::vector<Measurement> parse_policies(const std::string& list) {
  std::vector<Measurement> measurements;
  measurements.push_back({parse_policy("fp32")});
  for (const std::string& name : split_policies(list)) {
    Policy policy = parse_policy(name);
    require_kernels(policy);
    const auto is_same = [&](const Measurement& m) { return m.policy.name == policy.name; };
    if (std::none_of(measurements.begin(), measurements.end(), is_same))
      measurements.push_back({std::move(policy)});
  }
  return measurements;
}

/// Scoring starts behind the calibration's text whatever the policies, so that figures compare.
Sample read_sample(const Options& options, const Tokenizer& tokenizer) {
  constexpr std::size_t handbook_characters = 20000;
  constexpr std::size_t calibration_tokens = 512;
  const Prose prose = read_prose(options.text);
  Sample sample;
  sample.name = prose.name;
  if (prose.is_handbook) {
    const std::size_t start = utf8_prefix(prose.text, handbook_characters);
    sample.calibration = tokenizer.encode(std::string_view(prose.text).substr(0, start));
    sample.calibration.resize(std::min(sample.calibration.size(), calibration_tokens));
    sample.scored = tokenizer.encode(std::string_view(prose.text).substr(start));
  } else {
    const std::vector<TokenId> all = tokenizer.encode(prose.text);
    const auto start = static_cast<std::ptrdiff_t>(std::min(all.size() / 10, calibration_tokens));
    sample.calibration.assign(all.begin(), all.begin() + start);
    sample.scored.assign(all.begin() + start, all.end());
  }
  const std::string there =
      prose.name + ": the text has " + std::to_string(sample.scored.size()) + " tokens to score";
  if (sample.scored.size() < 2)
    throw std::runtime_error(there + ", at least 2 are needed: the first one only predicts");
  const auto wanted = static_cast<std::size_t>(options.tokens);
  if (sample.scored.size() < wanted && options.tokens_given)
    throw std::runtime_error(there + ", --tokens asks for " + std::to_string(wanted));
  sample.scored.resize(std::min(sample.scored.size(), wanted));
  return sample;
}

/// Runs all policies over one window, chunk by chunk, so that only two chunks of logits exist at a time.
void measure_window(const Llama& model, std::span<const TokenId> window, const KvOptions& options,
                    std::vector<Measurement>& measurements, Progress& progress) {
  for (Measurement& m : measurements) {
    KvOptions own = options;
    own.policy = m.policy;
    m.cache = make_kv_cache(model.kv_shape(), own);
    m.sequence = m.cache->create();
  }
  for (std::size_t begin = 0; begin < window.size(); begin += chunk) {
    const auto tokens = window.subspan(begin, std::min<std::size_t>(chunk, window.size() - begin));
    // The window's last token predicts nothing that is known.
    const auto next = window.subspan(begin + 1, std::min(tokens.size(), window.size() - begin - 1));
    Activations reference;
    for (Measurement& m : measurements) {
      const Llama::Row row{m.sequence, tokens};
      const auto start = std::chrono::steady_clock::now();
      Activations logits = model.forward_all({&row, 1}, *m.cache);
      m.seconds += seconds_since(start);
      const bool is_reference = &m == &measurements.front();
      if (is_reference) reference = std::move(logits);
      m.divergence.add(reference, is_reference ? reference : logits, next, options.threads);
      progress.add(static_cast<std::int64_t>(tokens.size()), m.policy.name);
    }
  }
  for (Measurement& m : measurements) {
    // The first window is the longest, so most of its pages are coded.
    if (m.bits_per_value == 0.0) m.bits_per_value = m.cache->bits_per_value();
    m.bytes += m.cache->report().bytes_used;
    m.tokens += m.cache->length(m.sequence);
    m.cache.reset();
  }
}

void evaluate(const Options& options) {
  std::vector<Measurement> measurements = parse_policies(options.policies);
  const int threads = options.threads > 0
                          ? options.threads
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const GgufFile file = GgufFile::open(options.model.empty() ? default_model() : options.model);
  const Llama model(file, threads);  // before the tokenizer: it knows what architecture the file is of
  const Tokenizer tokenizer(file);
  if (tokenizer.vocab_size() != model.vocabulary())
    throw std::runtime_error(file.path() + ": the vocabulary and the embedding differ in size");
  if (options.context > model.context_length() && options.context_given)
    throw std::runtime_error("--context " + std::to_string(options.context) + ": the model's context holds " +
                             std::to_string(model.context_length()));
  const Sample sample = read_sample(options, tokenizer);
  const OutputFile csv(options.csv), svg(options.svg);
  if (sample.scored.size() < static_cast<std::size_t>(options.tokens))
    say(sample.name + ": the text has " + std::to_string(sample.scored.size()) +
        " tokens to score, fewer than the default of " + std::to_string(options.tokens));
  const auto context = static_cast<std::size_t>(std::min(options.context, model.context_length()));

  KvOptions kv;
  kv.page_tokens = options.page_tokens;
  kv.max_tokens = static_cast<std::int32_t>(std::min(context, sample.scored.size()));
  kv.threads = threads;
  kv.plain_path = options.path == "plain";
  const auto needy = std::find_if(measurements.begin(), measurements.end(),
                                  [](const Measurement& m) { return policy_needs_calibration(m.policy); });
  if (needy != measurements.end()) {
    if (sample.calibration.empty())
      throw std::runtime_error(sample.name + ": the text is too short to calibrate " + needy->policy.name);
    kv.calibration = calibrate(model, sample.calibration, kv);
  }

  const std::span<const TokenId> tokens(sample.scored);
  {
    Progress progress(static_cast<std::int64_t>(tokens.size() * measurements.size()));
    for (std::size_t begin = 0; begin + 1 < tokens.size(); begin += context)
      measure_window(model, tokens.subspan(begin, std::min(context, tokens.size() - begin)), kv, measurements,
                     progress);
  }

  const nlohmann::json figures = figures_of(measurements, sample.name, context);
  if (csv.is_wanted()) csv.write(csv_of(figures));
  if (svg.is_wanted()) svg.write(svg_of(figures, file.path()));
  // A file's name may be any bytes.
  const std::string output =
      options.json ? figures.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + '\n'
                   : table_of(figures);
  std::fwrite(output.data(), 1, output.size(), stdout);
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw std::runtime_error("the output could not be written");
}

int fail(int status, const std::string& message) {
  say(message);
  return status;
}

std::string parts_list() {
  std::string list;
  for (const std::string& part : instantiated_parts()) list += (list.empty() ? "" : ", ") + part;
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Measures perplexity and divergence from a float32 cache, for policies of a paged KV cache.");
  app.footer(std::string("Policies: ") + policy_help + ".\nInstantiated here: " + parts_list() + ".");
  app.add_option("--model", options.model,
                 "GGUF file [$KVF_MODEL_DIR or build/model, SmolLM2-135M-Instruct.Q4_1.gguf]");
  app.add_option(
      "--text", options.text,
      std::string("text file, .html file, or folder of a handbook's pages; the first tenth, at most "
                  "512 tokens, or a handbook's first 20,000 characters only calibrate [") +
          handbook_folder + "]");
  auto* tokens = app.add_option("--tokens", options.tokens, "tokens of the text to take at most")
                     ->capture_default_str()
                     ->check(CLI::Range(2, 1 << 24));
  auto* context = app.add_option("--context", options.context, "tokens of one sequence")
                      ->capture_default_str()
                      ->check(CLI::Range(2, 1 << 24));
  app.add_option("--policies", options.policies, "names with commas between them")->capture_default_str();
  app.add_option("--page-tokens", options.page_tokens, "tokens a page")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--csv", options.csv, "file for the figures");
  app.add_option("--svg", options.svg, "file for a plot of divergence against bits per value");
  app.add_option("--path", options.path, "attention kernels")
      ->capture_default_str()
      ->check(CLI::IsMember({"plain", "fast"}));
  app.add_flag("--json", options.json, "print one JSON object instead of a table");
  app.add_option("--threads", options.threads, "[all processors]")->check(CLI::Range(1, 1024));
  std::signal(SIGPIPE, SIG_IGN);  // a reader that leaves is an error like any other
  try {
    app.parse(argc, argv);
    options.tokens_given = tokens->count() > 0;
    options.context_given = context->count() > 0;
    evaluate(options);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return fail(2, std::string(error.what()) + "; see evaluate --help");
  } catch (const std::invalid_argument& error) {
    return fail(2, error.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "there is not enough memory: ask for a shorter context or fewer policies");
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}
