// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Random steps against an oracle that keeps every sequence's tokens in a plain vector.

#include <map>
#include <set>

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int layers = 2, kv_heads = 2, dim = 8;

/// A token's key or value element: recognisable, exact in fp16, and safe in Int8 (which is compared
/// by code).
float element(int token, int layer, int head, int d, bool value) {
  return static_cast<float>((token * 31 + layer * 17 + head * 7 + d * 3 + (value ? 5 : 0)) % 255 - 127);
}

template <class Layout, class Quant, class Evict>
class RandomRun {
 public:
  RandomRun(const CacheConfig& config, Evict evict, std::uint64_t seed)
      : cache_(config, {}, evict), random_(seed) {
    poison(cache_);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      one_step();
      if (batches_.size() > 2 || random_.between(0, 2) == 0) batches_.clear();
      verify();
      check_contents(texts_);
    }
  }

 private:
  using Texts = std::map<SeqId, std::vector<int>>;

  void one_step() {
    Texts texts = texts_;  // becomes the truth when the step is committed
    Step step = cache_.begin_step();
    Texts extended;  // sequences that have tokens of this step
    touched_.clear();
    const int operations = random_.between(1, 6);
    for (int i = 0; i < operations; ++i) {
      operate(step, texts, extended);
      verify();
      // Whoever this step has not touched is what it was.
      Texts untouched = texts_;
      std::erase_if(untouched, [&](const auto& entry) { return touched_.count(entry.first) > 0; });
      check_contents(untouched);
    }
    if (random_.between(0, 3) == 0) return;  // rolled back

    texts_ = texts;
    const Batch& batch = batches_.emplace_back(step.commit());
    cache_.store().copy(batch.copies(), Backwards{});
    NewTokens<Layout> tokens;
    for (int layer = 0; layer < layers; ++layer) {
      tokens.keys.clear();
      tokens.values.clear();
      for (int row = 0; row < batch.rows(); ++row) {
        const std::vector<int>& text = texts_.at(batch.sequence(row));
        const BatchView view = batch;
        for (int t = view.query_pos[row]; t < static_cast<int>(text.size()); ++t)
          for (int head = 0; head < kv_heads; ++head) {
            for (int d = 0; d < Layout::key_dim; ++d)
              tokens.keys.push_back(element(text[static_cast<std::size_t>(t)], layer, head, d, false));
            for (int d = 0; d < Layout::value_dim; ++d)
              tokens.values.push_back(element(text[static_cast<std::size_t>(t)], layer, head, d, true));
          }
      }
      REQUIRE(static_cast<int>(tokens.keys.size()) == batch.tokens() * kv_heads * Layout::key_dim);
      REQUIRE(cpu::append(cache_.view(LayerId{layer}), batch, tokens.args(kv_heads), cpu::serial));
    }
  }

  void operate(Step& step, Texts& texts, Texts& extended) {
    const int what = texts.empty() ? 0 : random_.between(0, 9);
    if (what == 0) {
      texts[*step.create()] = {};
      return;
    }
    auto it = texts.begin();
    std::advance(it, random_.between(0, static_cast<int>(texts.size()) - 1));
    const SeqId id = it->first;
    if (what != 6) touched_.insert(id);
    std::vector<int>& text = it->second;
    if (what <= 5) {
      const int tokens = random_.between(0, 3) == 0 ? random_.between(0, 40) : random_.between(0, 3);
      if (const auto ok = step.extend(id, tokens)) {
        for (int i = 0; i < tokens; ++i) text.push_back(next_token_++);
        extended[id];
      } else {
        CHECK(ok.error().code == Errc::out_of_pages);
        CHECK(ok.error().missing() > 0);
      }
    } else if (what == 6) {
      const auto child = step.fork(id);
      if (child) {
        const std::vector<int> copy = text;
        texts[*child] = copy;
      } else {
        CHECK(child.error().code == Errc::pending_tokens);
        CHECK(extended.count(id) == 1);
      }
    } else if (what == 7 || what == 8) {
      const int to = random_.between(0, static_cast<int>(text.size()));
      if (const auto ok = step.truncate(id, to))
        text.resize(static_cast<std::size_t>(to));
      else
        CHECK(ok.error().code == Errc::position_evicted);
    } else {
      REQUIRE(step.release(id));
      texts.erase(it);
    }
  }

  void verify() {
    const std::vector<std::string> violations = cache_.verify();
    CAPTURE(violations);
    CHECK(violations.empty());
  }

  /// Every retained token of every sequence, decoded, and no position missing that a window needs.
  void check_contents(const Texts& texts) {
    int wrong = 0;
    for (const auto& [id, text] : texts) {
      const SequenceInfo info = *cache_.sequence(id);
      REQUIRE(info.length == static_cast<int>(text.size()));
      std::vector<bool> there(text.size(), false);
      for (const TablePage& page : info.pages)
        for (int slot = 0; slot < cache_.page_tokens() && page.begin.value + slot < info.length; ++slot) {
          const auto position = static_cast<std::size_t>(page.begin.value + slot);
          there[position] = true;
          for (int layer = 0; layer < layers; ++layer)
            wrong += !holds(page.entry, slot, layer, text[position]);
        }
      const Window window = cache_.evict().visible();
      for (std::size_t p = 0; p < text.size(); ++p)
        wrong += window.sees(info.length, static_cast<int>(p)) && !there[p];
    }
    CHECK(wrong == 0);
  }

  bool holds(TableEntry entry, int slot, int layer, int token) const {
    const auto view = cache_.view(LayerId{layer});
    bool equal = true;
    float got[Layout::key_dim], expected[Layout::key_dim];
    for (int head = 0; head < kv_heads; ++head)
      visit_format(view, entry, [&](const auto& quant) {
        const auto compare = [&](const auto& tile, int dims, bool value) {
          quant.decode(tile, slot, got);
          for (int d = 0; d < dims; ++d) expected[d] = element(token, layer, head, d, value);
          float amax = 0.0f;
          for (int d = 0; d < dims; ++d) amax = std::max(amax, std::fabs(expected[d]));
          const bool exact = entry.format() == exact_format<Quant>;
          for (int d = 0; d < dims; ++d)
            equal =
                equal && std::fabs(got[d] - expected[d]) <= (exact ? 0.0f : amax * (0.5f / 127 + 0x1p-10f));
        };
        compare(view.key_tile(entry, head), Layout::key_dim, false);
        if constexpr (!Layout::shares_key_value)
          compare(view.value_tile(entry, head), Layout::value_dim, true);
      });
    return equal;
  }

  PagedCache<Layout, Quant, Evict> cache_;
  Random random_;
  Texts texts_;
  std::set<SeqId> touched_;  // by the open step
  std::vector<Batch> batches_;
  int next_token_ = 0;
};

template <class Layout, class Quant, class Evict = KeepAll>
void random_runs(CacheConfig config, Evict evict = {}) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    INFO("seed " << seed);
    RandomRun<Layout, Quant, Evict>(config, evict, seed).run(120);
  }
}

}  // namespace

TEST_CASE("random operations keep what a plain vector keeps: fp32") {
  random_runs<Gqa<dim, 4>, Identity<float>>({.shape = {layers, kv_heads, dynamic}, .pages = 40});
}
TEST_CASE("random operations keep what a plain vector keeps: int8 with exact sinks, page-major") {
  random_runs<Gqa<dim, dynamic, DimMajor<4>, SlotPairs<2>>, Int8>({.shape = {layers, kv_heads, 6},
                                                                   .pages = 30,
                                                                   .exact_pages = 12,
                                                                   .exact_sink_pages = 1,
                                                                   .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain vector keeps: fp16 with a window") {
  random_runs<Gqa<dim, 4>, Identity<fp16>>({.shape = {layers, kv_heads, dynamic}, .pages = 30},
                                           SinkWindow{3, 9});
}
TEST_CASE("random operations keep what a plain vector keeps: latent int8 with a window and exact sinks") {
  random_runs<Mla<dim, 4, 1>, Int8>(
      {.shape = {layers, kv_heads, dynamic}, .pages = 90, .exact_pages = 20, .exact_sink_pages = 2},
      SinkWindow{2, 17});
}
