// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Random steps against a model that keeps every sequence's tokens in a plain list: tables, formats and
// contents, to the bit.

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/model_cache.hpp"

namespace kvfolia_tests::random_run {

inline constexpr int layers = 2, kv_heads = 2, dim = 8;

/// Where a run's pages are, and who writes them: the host.
template <class LayoutT, class QuantT, class EvictT>
class OnHost {
 public:
  using Layout = LayoutT;
  using Quant = QuantT;
  using Cache = PagedCache<Layout, Quant, EvictT>;

  OnHost(const CacheConfig& config, EvictT evict, std::uint64_t /*seed*/) : cache_(config, {}, evict) {}

  Cache& cache() { return cache_; }
  /// tokens_of(batch, layer) gives new tokens' keys and values.
  template <class Tokens>
  void write(Batch of_step, Tokens&& tokens_of) {
    const Batch& batch = batches_.emplace_back(std::move(of_step));
    cache_.store().copy(batch.copies(), Backwards{});
    for (int layer = 0; layer < cache_.shape().layers; ++layer) {
      const NewTokens<Layout> tokens = tokens_of(batch, layer);
      if (batch.has_appends())
        REQUIRE(cpu::append(cache_.view(LayerId{layer}), batch, tokens.args(cache_.shape().kv_heads),
                            Backwards{}));
    }
  }
  void end_batches(bool all) {
    if (batches_.size() > 2 || all) batches_.clear();
  }

 private:
  Cache cache_;
  std::vector<Batch> batches_;
};

/// Random steps, each operation followed by all checks.
template <class Place>
class RandomRun {
 public:
  using Layout = typename Place::Layout;
  using Quant = typename Place::Quant;

  template <class Evict>
  RandomRun(const CacheConfig& config, Evict evict, std::uint64_t seed)
      : place_(config, evict, seed),
        cache_(place_.cache()),
        model_(config.shape, cache_.page_tokens(), config.exact_sink_pages),
        random_(seed) {
    poison(cache_);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      one_step();
      place_.end_batches(random_.between(0, 2) == 0);
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
    place_.write(step.commit(), [&](const Batch& batch, int layer) {
      NewTokens<Layout> tokens;
      for (int row = 0; row < batch.rows(); ++row) {
        const ModelSequence& text = texts_.at(batch.sequence(row));
        for (int t = batch.view().query_pos[row]; t < text.length(); ++t)
          for (int head = 0; head < kv_heads; ++head) {
            const int id = text.tokens[static_cast<std::size_t>(t)]->id;
            for (int d = 0; d < Layout::key_dim; ++d)
              tokens.keys.push_back(model_.element(id, layer, head, d, false));
            for (int d = 0; d < Layout::value_dim; ++d)
              tokens.values.push_back(model_.element(id, layer, head, d, true));
          }
      }
      REQUIRE(static_cast<int>(tokens.keys.size()) == batch.tokens() * kv_heads * Layout::key_dim);
      return tokens;
    });
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
  Place place_;
  typename Place::Cache& cache_;
  Model model_;
  Random random_;
  Texts texts_;
  std::set<SeqId> touched_;  // by the open step
  std::map<std::int32_t, std::vector<std::byte>> retired_;
};

}  // namespace kvfolia_tests::random_run
