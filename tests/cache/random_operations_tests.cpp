// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Random steps against a model that keeps every sequence's tokens in a plain list: tables, formats and
// contents, to the bit.

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "support/model_cache.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int layers = 2, kv_heads = 2, dim = 8;

template <class Layout, class Quant, class Evict>
class RandomRun {
 public:
  RandomRun(const CacheConfig& config, Evict evict, std::uint64_t seed)
      : cache_(config, {}, evict),
        model_(config.shape, cache_.page_tokens(), config.exact_sink_pages),
        random_(seed) {
    poison(cache_);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      one_step();
      if (batches_.size() > 2 || random_.between(0, 2) == 0) batches_.clear();
      verify();
      check_contents(texts_);
      check_retired();
    }
    CHECK(model_.too_far() == 0);
  }

 private:
  using Texts = std::map<SeqId, ModelSequence>;
  using Table = std::pair<int, std::vector<TablePage>>;

  /// All that a step may change on the host.
  struct Snapshot {
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> counts;
    std::map<SeqId, Table> tables;
    friend bool operator==(const Snapshot&, const Snapshot&) = default;
  };

  Table table(SeqId id) const {
    const SequenceInfo info = *cache_.sequence(id);
    return {info.length, {info.pages.begin(), info.pages.end()}};
  }
  Snapshot snapshot(const Texts& texts) const {
    Snapshot now;
    for (int f = 0; f < format_count<Quant>; ++f) {
      const FormatStats s = cache_.stats(f);
      now.counts.emplace_back(s.free, s.held, s.retired, s.references);
    }
    for (const auto& entry : texts) now.tables[entry.first] = table(entry.first);
    return now;
  }

  void one_step() {
    const Snapshot before = snapshot(texts_);
    {
      Texts texts = texts_;  // becomes the truth when the step is committed
      Step step = cache_.begin_step();
      touched_.clear();
      const int operations = random_.between(1, 8);
      for (int i = 0; i < operations; ++i) {
        operate(step, texts);
        verify();
        // Whoever this step has not touched is what it was.
        Texts untouched = texts_;
        std::erase_if(untouched, [&](const auto& entry) { return touched_.count(entry.first) > 0; });
        check_contents(untouched);
        check_tables(texts);
      }
      if (random_.between(0, 3) != 0) {
        texts_ = std::move(texts);
        commit(std::move(step));
        return;
      }
    }
    CHECK(snapshot(texts_) == before);
  }

  void commit(Step step) {
    const Batch& batch = batches_.emplace_back(step.commit());
    cache_.store().copy(batch.copies(), Backwards{});
    NewTokens<Layout> tokens;
    for (int layer = 0; layer < layers; ++layer) {
      tokens.keys.clear();
      tokens.values.clear();
      for (int row = 0; row < batch.rows(); ++row) {
        const ModelSequence& text = texts_.at(batch.sequence(row));
        const BatchView view = batch;
        for (int t = view.query_pos[row]; t < text.length(); ++t)
          for (int head = 0; head < kv_heads; ++head) {
            const int id = text.tokens[static_cast<std::size_t>(t)]->id;
            for (int d = 0; d < Layout::key_dim; ++d)
              tokens.keys.push_back(model_.element(id, layer, head, d, false));
            for (int d = 0; d < Layout::value_dim; ++d)
              tokens.values.push_back(model_.element(id, layer, head, d, true));
          }
      }
      REQUIRE(static_cast<int>(tokens.keys.size()) == batch.tokens() * kv_heads * Layout::key_dim);
      if (batch.has_appends())
        REQUIRE(cpu::append(cache_.view(LayerId{layer}), batch, tokens.args(kv_heads), Backwards{}));
    }
    for (auto& entry : texts_) model_.write(entry.second);
  }

  void operate(Step& step, Texts& texts) {
    const int what = texts.empty() ? 0 : random_.between(0, Model::low >= 0 ? 13 : 10);
    if (what == 0) {
      texts[*step.create()] = {};
      return;
    }
    auto it = texts.begin();
    std::advance(it, random_.between(0, static_cast<int>(texts.size()) - 1));
    const SeqId id = it->first;
    if (what != 6) touched_.insert(id);
    ModelSequence& text = it->second;
    const Table old = table(id);
    const auto refused = [&](const Error& error) {
      CHECK(table(id) == old);
      if (error.code != Errc::out_of_pages) return;
      const std::string subject = error.subject;
      const int format = subject == "coded pages" ? coded_format
                         : subject == "low pages" ? Model::low
                                                  : Model::exact;
      CHECK(subject == (format == coded_format ? "coded pages"
                        : format == Model::low ? "low pages"
                                               : "exact pages"));
      CHECK(error.available == cache_.pool(format).free_pages());
      CHECK(error.missing() > 0);
    };
    if (what <= 5) {
      const int tokens = random_.between(0, 3) == 0 ? random_.between(0, 40) : random_.between(0, 3);
      if (const auto ok = step.extend(id, tokens)) {
        model_.extend(text, tokens);
      } else {
        CHECK(ok.error().code == Errc::out_of_pages);
        refused(ok.error());
      }
    } else if (what == 6) {
      const auto child = step.fork(id);
      if (child) {
        CHECK(text.written() == text.length());
        const ModelSequence copy = text;
        texts[*child] = copy;
      } else {
        CHECK(child.error().code == Errc::pending_tokens);
        CHECK(text.written() < text.length());
      }
    } else if (what <= 9) {
      const int to =
          what == 9 ? std::max(0, text.length() - random_.between(0, 3)) : random_.between(0, text.length());
      if (const auto ok = step.truncate(id, to)) {
        model_.truncate(text, to);
      } else {
        CHECK((ok.error().code == Errc::position_evicted || ok.error().code == Errc::out_of_pages));
        refused(ok.error());
      }
    } else if (what == 10) {
      REQUIRE(step.release(id));
      texts.erase(it);
    } else {
      const int pages = static_cast<int>(old.second.size());
      const int page = random_.between(-1, pages);
      const bool there = 0 <= page && page < pages;
      const int index =
          there ? old.second[static_cast<std::size_t>(page)].begin.value / cache_.page_tokens() : 0;
      const bool allowed = there && model_.can_demote(text, index);
      if (const auto ok = step.demote(id, page)) {
        CHECK(allowed);
        model_.demote(text, index);
      } else {
        CHECK((!allowed || ok.error().code == Errc::out_of_pages));
        refused(ok.error());
      }
    }
  }

  void verify() {
    const std::vector<std::string> violations = cache_.verify();
    CAPTURE(violations);
    CHECK(violations.empty());
  }

  void check_tables(const Texts& texts) {
    int wrong = 0;
    for (const auto& [id, text] : texts) {
      const SequenceInfo info = *cache_.sequence(id);
      wrong += info.length != text.length();
      for (const TablePage& page : info.pages)
        wrong += page.entry.format() !=
                 text.formats[static_cast<std::size_t>(page.begin.value / cache_.page_tokens())];
    }
    CHECK(wrong == 0);
  }

  /// Every retained token of every sequence, decoded, and no position missing that a window needs.
  void check_contents(const Texts& texts) {
    check_tables(texts);
    int wrong = 0;
    for (const auto& [id, text] : texts) {
      const SequenceInfo info = *cache_.sequence(id);
      REQUIRE(info.length == text.length());
      std::vector<bool> there(text.tokens.size(), false);
      for (const TablePage& page : info.pages)
        for (int slot = 0; slot < cache_.page_tokens() && page.begin.value + slot < info.length; ++slot) {
          const auto position = static_cast<std::size_t>(page.begin.value + slot);
          there[position] = true;
          for (int layer = 0; layer < layers; ++layer)
            wrong +=
                !model_.holds(cache_.view(LayerId{layer}), page.entry, slot, layer, *text.tokens[position]);
        }
      const Window window = cache_.evict().visible();
      for (std::size_t p = 0; p < there.size(); ++p)
        wrong += window.sees(info.length, static_cast<int>(p)) && !there[p];
    }
    CHECK(wrong == 0);
  }

  /// A page that waits for a batch to end keeps its bytes until then.
  void check_retired() {
    std::map<std::int32_t, std::vector<std::byte>> now;
    for (int f = 0; f < format_count<Quant>; ++f)
      for (std::int32_t page = 0; page < cache_.pool(f).pages(); ++page) {
        if (cache_.pool(f).state(PageId{page}) != PageState::retired) continue;
        std::vector<std::byte>& bytes = now[TableEntry::make(f, PageId{page}).raw];
        const std::int64_t size = cache_.store().page_bytes(f) / layers;
        for (int layer = 0; layer < layers; ++layer) {
          const std::byte* data = cache_.store().data(f, layer) + page * cache_.store().page_stride(f);
          bytes.insert(bytes.end(), data, data + size);
        }
      }
    for (const auto& [page, bytes] : retired_)
      if (now.count(page) > 0) CHECK(now[page] == bytes);
    retired_ = std::move(now);
  }

  using Model = ModelCache<Layout, Quant>;
  PagedCache<Layout, Quant, Evict> cache_;
  Model model_;
  Random random_;
  Texts texts_;
  std::set<SeqId> touched_;  // by the open step
  std::vector<Batch> batches_;
  std::map<std::int32_t, std::vector<std::byte>> retired_;
};

template <class Layout, class Quant, class Evict = KeepAll>
void random_runs(CacheConfig config, Evict evict = {}) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    INFO("seed " << seed);
    RandomRun<Layout, Quant, Evict>(config, evict, seed).run(120);
  }
}

constexpr CacheShape small{layers, kv_heads, dynamic};

}  // namespace

TEST_CASE("random operations keep what a plain list keeps: fp32") {
  random_runs<Gqa<dim, 4>, Identity<float>>({.shape = small, .pages = 40});
}
TEST_CASE("random operations keep what a plain list keeps: int8 with exact sinks, page-major") {
  random_runs<Gqa<dim, dynamic, DimMajor<4>, SlotPairs<2>>, Int8>({.shape = {layers, kv_heads, 6},
                                                                   .pages = 30,
                                                                   .exact_pages = 12,
                                                                   .exact_sink_pages = 1,
                                                                   .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: fp16 with a window") {
  random_runs<Gqa<dim, 4>, Identity<fp16>>({.shape = small, .pages = 30}, SinkWindow{3, 9});
}
TEST_CASE("random operations keep what a plain list keeps: latent int8 with a window and exact sinks") {
  random_runs<Mla<dim, 4, 1>, Int8>({.shape = small, .pages = 90, .exact_pages = 20, .exact_sink_pages = 2},
                                    SinkWindow{2, 17});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of one block") {
  random_runs<Gqa<dim, 4>, Int4Channels<4>>({.shape = small, .pages = 24, .exact_pages = 14});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of two blocks with exact sinks") {
  random_runs<Gqa<dim, 8>, Centered<Int8, 4>>(
      {.shape = small, .pages = 16, .exact_pages = 16, .exact_sink_pages = 1});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of three blocks, page-major") {
  random_runs<Gqa<dim, dynamic, DimMajor<4>, SlotPairs<2>>, KeyValue<Centered<Int8, 2>, Int8>>(
      {.shape = {layers, kv_heads, 6}, .pages = 16, .exact_pages = 12, .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: sealed rotated pages with a window") {
  random_runs<Gqa<dim, 4>, KeyValue<Rotated<Centered<Int4<0>, 4>>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14}, SinkWindow{3, 9});
}
TEST_CASE("random operations keep what a plain list keeps: keys and values rotated differently") {
  random_runs<Gqa<dim, 4>, KeyValue<Int4Channels<2>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14, .exact_sink_pages = 2}, SinkWindow{6, 5});
}
TEST_CASE(
    "random operations keep what a plain list keeps: latent sealed pages with a window and exact sinks") {
  random_runs<Mla<dim, dim, 4>, Rotated<Centered<Int8, 4>, 8>>(
      {.shape = small, .pages = 20, .exact_pages = 16, .exact_sink_pages = 1}, SinkWindow{5, 11});
}
TEST_CASE("random operations keep what a plain list keeps: demoted pages that are coded as a whole") {
  random_runs<Gqa<dim, 4>, Mixed<Int8, KeyValue<Int4Channels<4>, Int4<0>>>>(
      {.shape = small, .pages = 26, .exact_pages = 8, .low_pages = 8, .exact_sink_pages = 1});
}
TEST_CASE("random operations keep what a plain list keeps: demoted pages, no exact ones") {
  random_runs<Gqa<dim, 4>, Mixed<Int8, Int4<0>>>({.shape = small, .pages = 26, .low_pages = 8},
                                                 SinkWindow{3, 14});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages that are demoted") {
  random_runs<Gqa<dim, 8>, Mixed<Centered<Int8, 4>, Int4Channels<8>>>(
      {.shape = small, .pages = 16, .exact_pages = 14, .low_pages = 8, .exact_sink_pages = 1},
      SinkWindow{3, 25});
}
TEST_CASE("random operations keep what a plain list keeps: sealed rotated pages that are demoted") {
  random_runs<Gqa<dim, 4>, Mixed<KeyValue<Rotated<Centered<Int8, 2>>, Rotated<Int8>>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14, .low_pages = 6, .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: exact pages that are demoted") {
  random_runs<Gqa<dim, 4>, Mixed<Identity<fp16>, Int4Channels<4>>>(
      {.shape = small, .pages = 26, .low_pages = 8, .exact_sink_pages = 1}, SinkWindow{3, 21});
}
