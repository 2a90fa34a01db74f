// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Generates text with a Llama-family model, every key and value of which lives in a PagedCache.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/chat.hpp"
#include "common/gguf.hpp"
#include "common/kv_cache.hpp"
#include "common/llama.hpp"
#include "common/policy.hpp"
#include "common/program.hpp"
#include "common/sampling.hpp"
#include "common/tokenizer.hpp"
#include "common/utf8.hpp"

namespace {

using namespace kvfolia_examples;

struct Options {
  std::string model, prompt, prompt_file, chat, policy = "fp16", order = "slot", path = "fast";
  int tokens = 128, page_tokens = 32, threads = 0, forks = 0;
  double temperature = -1.0;
  std::uint64_t seed = 0;
  bool json = false;
};

/// One continuation of the prompt.
struct Continuation {
  SeqId sequence;
  Sampler sampler;
  std::vector<TokenId> tokens{};
  std::vector<double> logprobs{};
  bool ended = false;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string text_of(const Tokenizer& tokenizer, const std::vector<TokenId>& tokens) {
  std::string text;
  for (const TokenId token : tokens) text += tokenizer.decode(token);
  return text;
}

/// Prints text as it comes, whole characters only.
class Printer {
 public:
  explicit Printer(bool on) : on_(on) {}
  void print(std::string_view bytes) { put(stream_.push(bytes)); }
  void finish() { put(stream_.finish()); }

 private:
  void put(const std::string& text) const {
    if (!on_) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  Utf8Stream stream_;
  bool on_;
};

/// The prompt, in chunks that bound the memory of activations; gives the logits behind its last token.
Activations read_prompt(const Llama& model, KvCache& cache, SeqId sequence, std::span<const TokenId> tokens) {
  constexpr std::size_t chunk = 256;
  Activations logits;
  for (std::size_t done = 0; done < tokens.size(); done += chunk) {
    const Llama::Row row{sequence, tokens.subspan(done, std::min(chunk, tokens.size() - done))};
    logits = model.forward({&row, 1}, cache);
  }
  return logits;
}

/// Gives every continuation up to `limit` tokens, one of each a step, and calls `seen` after each
/// step. Returns how many tokens went through the model.
template <class Seen>
std::int64_t continue_all(const Llama& model, KvCache& cache, std::vector<Continuation>& continuations,
                          Activations logits, TokenId eos, int limit, Seen seen) {
  std::int64_t forwarded = 0;
  for (int step = 0; step < limit; ++step) {
    std::vector<Continuation*> live;
    for (Continuation& c : continuations)
      if (!c.ended) live.push_back(&c);
    if (live.empty()) break;
    if (step > 0) {
      std::vector<Llama::Row> rows;
      for (const Continuation* c : live) rows.push_back({c->sequence, std::span(&c->tokens.back(), 1)});
      logits = model.forward(rows, cache);
      forwarded += static_cast<std::int64_t>(rows.size());
    }
    for (std::size_t i = 0; i < live.size(); ++i) {
      // The first tokens of all come from the prompt's one row of logits.
      const auto row = step == 0 ? 0 : static_cast<Eigen::Index>(i);
      const Choice choice =
          live[i]->sampler.choose({logits.row(row).data(), static_cast<std::size_t>(logits.cols())});
      live[i]->tokens.push_back(choice.token);
      live[i]->logprobs.push_back(choice.logprob);
      live[i]->ended = choice.token == eos;
    }
    seen(step + 1);
  }
  return forwarded;
}

struct Figures {
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
  double prefill_attention_seconds = 0.0;  ///< of the former: storing keys and values, and attending
  double decode_attention_seconds = 0.0;
  std::int64_t forwarded = 0;
  double bytes_per_token = 0.0;
  KvCache::Report report;
};

nlohmann::json describe(const Tokenizer& tokenizer, const Continuation& c) {
  return {{"text", text_of(tokenizer, c.tokens)}, {"tokens", c.tokens}, {"logprobs", c.logprobs}};
}

void print_json(const Options& options, const Tokenizer& tokenizer, const std::vector<TokenId>& prompt,
                const std::vector<Continuation>& continuations, const Figures& figures) {
  nlohmann::json json = describe(tokenizer, continuations.front());
  json["prompt_tokens"] = prompt;
  json["prefill_seconds"] = figures.prefill_seconds;
  json["decode_seconds"] = figures.decode_seconds;
  json["prefill_attention_seconds"] = figures.prefill_attention_seconds;
  json["decode_attention_seconds"] = figures.decode_attention_seconds;
  json["cache_bytes_per_token"] = figures.bytes_per_token;
  json["pages_used"] = figures.report.pages_used;
  if (options.forks > 0) {
    for (const Continuation& c : continuations) json["forks"].push_back(describe(tokenizer, c));
    json["pages_shared"] = figures.report.pages_shared;
    json["bytes_saved"] = figures.report.bytes_saved;
  }
  // A token may end inside a character.
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_figures(const Options& options, std::size_t prompt_tokens, const Figures& figures) {
  constexpr double mib = 1 << 20;
  const auto percent = [](double part, double whole) { return 100.0 * part / whole; };
  std::printf("\nprompt     %zu tokens, %.1f tokens/s, %.0f%% of the time in attention\n", prompt_tokens,
              static_cast<double>(prompt_tokens) / figures.prefill_seconds,
              percent(figures.prefill_attention_seconds, figures.prefill_seconds));
  if (figures.forwarded > 0)
    std::printf("generated  %.1f tokens/s, %.0f%% of the time in attention\n",
                static_cast<double>(figures.forwarded) / figures.decode_seconds,
                percent(figures.decode_attention_seconds, figures.decode_seconds));
  std::printf("cache      %s, %.0f bytes a token, %lld pages of %d tokens, %.2f MiB\n",
              options.policy.c_str(), figures.bytes_per_token,
              static_cast<long long>(figures.report.pages_used), options.page_tokens,
              static_cast<double>(figures.report.bytes_used) / mib);
  if (options.forks > 0)
    std::printf("sharing    %lld pages have several owners; copies would take %.2f MiB more\n",
                static_cast<long long>(figures.report.pages_shared),
                static_cast<double>(figures.report.bytes_saved) / mib);
}

void generate(const Options& options) {
  const Policy policy = parse_policy(options.policy);
  require_kernels(policy);
  const std::string prompt = options.prompt_file.empty() ? options.prompt : read_file(options.prompt_file);
  const int threads = options.threads > 0
                          ? options.threads
                          : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const GgufFile file = GgufFile::open(options.model.empty() ? default_model() : options.model);
  const Llama model(file, threads);  // before the tokenizer: it knows what architecture the file is of
  const Tokenizer tokenizer(file);
  if (tokenizer.vocab_size() != model.vocabulary())
    throw std::runtime_error(file.path() + ": the vocabulary and the embedding differ in size");

  const std::vector<TokenId> prompt_tokens =
      options.chat.empty() ? tokenizer.encode(prompt) : chat_prompt(file, tokenizer, options.chat);
  if (prompt_tokens.empty()) throw std::runtime_error("the prompt has no tokens: give some text");
  const auto total = static_cast<std::int64_t>(prompt_tokens.size()) + options.tokens;
  if (total > model.context_length())
    throw std::runtime_error("prompt and --tokens make " + std::to_string(total) +
                             " tokens, the model's context holds " + std::to_string(model.context_length()) +
                             ": shorten one of them");
  const int count = std::max(1, options.forks);
  const auto cache = make_kv_cache(
      model.kv_shape(), {.policy = policy,
                         .page_tokens = options.page_tokens,
                         .order = options.order == "dim" ? ElementOrderName::dim : ElementOrderName::slot,
                         .max_sequences = count,
                         .max_tokens = static_cast<std::int32_t>(total),
                         .threads = threads,
                         .plain_path = options.path == "plain"});

  // One text is printed as it comes; of several, only their progress, and that on a terminal.
  Printer printer(!options.json && options.forks == 0);
  if (!options.json && options.chat.empty())
    std::fwrite(prompt.data(), 1, prompt.size(), stdout), std::fflush(stdout);

  Figures figures;
  const auto start = std::chrono::steady_clock::now();
  const SeqId root = cache->create();
  Activations logits = read_prompt(model, *cache, root, prompt_tokens);
  figures.prefill_seconds = seconds_since(start);
  figures.prefill_attention_seconds = cache->report().attend_seconds;

  const double temperature = options.temperature >= 0.0 ? options.temperature : options.forks > 0 ? 0.8 : 0.0;
  std::vector<Continuation> continuations;
  for (int i = 0; i < count; ++i)
    continuations.push_back(
        {i == 0 ? root : cache->fork(root), {temperature, options.seed + static_cast<std::uint64_t>(i)}});
  const bool progress = options.forks > 0 && ::isatty(STDERR_FILENO) != 0;
  const auto decode_start = std::chrono::steady_clock::now();
  figures.forwarded = continue_all(model, *cache, continuations, std::move(logits), tokenizer.eos(),
                                   options.tokens, [&](int step) {
                                     printer.print(tokenizer.decode(continuations.front().tokens.back()));
                                     if (progress)
                                       std::fprintf(stderr, "\r\033[K%d of %d tokens", step, options.tokens);
                                   });
  figures.decode_seconds = seconds_since(decode_start);
  printer.finish();
  if (progress) std::fprintf(stderr, "\r\033[K");

  figures.report = cache->report();
  figures.decode_attention_seconds = figures.report.attend_seconds - figures.prefill_attention_seconds;
  std::int64_t stored = 0;  // tokens over all sequences, shared ones counted for each
  for (const Continuation& c : continuations) stored += cache->length(c.sequence);
  figures.bytes_per_token = static_cast<double>(figures.report.bytes_used) / static_cast<double>(stored);

  if (options.json) {
    print_json(options, tokenizer, prompt_tokens, continuations, figures);
  } else {
    if (options.forks > 0)
      for (std::size_t i = 0; i < continuations.size(); ++i)
        std::printf("\n\n--- fork %zu\n%s", i, text_of(tokenizer, continuations[i].tokens).c_str());
    std::printf("\n");
    print_figures(options, prompt_tokens.size(), figures);
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw std::runtime_error("the output could not be written");
}

int fail(int status, const std::string& message) {
  std::fprintf(stderr, "generate: %s\n", one_line(message).c_str());
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Generates text with a Llama-family GGUF model through a paged KV cache.");
  app.add_option("--model", options.model,
                 "GGUF file [$KVF_MODEL_DIR or build/model, SmolLM2-135M-Instruct.Q4_1.gguf]");
  auto* input = app.add_option_group("input", "one of");
  input->add_option("--prompt", options.prompt, "text to continue");
  input->add_option("--prompt-file", options.prompt_file, "file with the text to continue");
  input->add_option("--chat", options.chat, "a question, put into the model's chat template");
  input->require_option(1);
  app.add_option("--tokens", options.tokens, "tokens to generate at most")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--temperature", options.temperature, "0 is greedy [0; 0.8 with --forks]")
      ->check(CLI::Validator(
          [](const std::string& text) {  // CLI::Range lets NaN pass
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            return end != text.c_str() && *end == 0 && value >= 0.0 && value <= 100.0
                       ? std::string()
                       : text + " is not in 0 to 100";
          },
          "in [0 - 100]"));
  app.add_option("--seed", options.seed, "of sampling; fork i takes seed + i")->capture_default_str();
  app.add_option("--policy", options.policy, policy_help)->capture_default_str();
  app.add_option("--page-tokens", options.page_tokens, "tokens a page")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--order", options.order, "element order in pages")
      ->capture_default_str()
      ->check(CLI::IsMember({"slot", "dim"}));
  app.add_option("--path", options.path,
                 "attention kernels: fast, or the plain ones, whose bits are the same for every page size "
                 "and machine")
      ->capture_default_str()
      ->check(CLI::IsMember({"plain", "fast"}));
  app.add_option("--threads", options.threads, "[all processors]")->check(CLI::Range(1, 1024));
  app.add_option("--forks", options.forks, "continuations that share the prompt's pages")
      ->check(CLI::Range(1, 4096));
  app.add_flag("--json", options.json, "print one JSON object instead of text");
  std::signal(SIGPIPE, SIG_IGN);  // a reader that leaves is an error like any other
  try {
    app.parse(argc, argv);
    generate(options);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return fail(2, std::string(error.what()) + "; see generate --help");
  } catch (const std::invalid_argument& error) {
    return fail(2, error.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "there is not enough memory: ask for fewer tokens or forks, or another policy");
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}
