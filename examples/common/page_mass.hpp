// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How much of the attention each page gets: what decides which pages may lose bits.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

namespace kvfolia_examples {

/// The mean share of attention, over layers, heads and the steps that it was there, that a sequence's newest
/// query gives each of its pages. A page's share is exp(lse of the page alone - lse of all pages): so it
/// takes nothing but attend() over tables of one page.
class PageMass {
 public:
  double of(kvfolia::TableEntry page) const {
    const auto found = mass_.find(page.raw);
    return found == mass_.end() ? 0.0 : found->second.sum / static_cast<double>(found->second.looks);
  }
  /// The page will hold other tokens.
  void forget(kvfolia::TableEntry page) { mass_.erase(page.raw); }

  /// Looks at one layer with the last query of each row; `queries` are those of the batch,
  /// [token][head][dim].
  template <class View, class Cache, class Exec>
  void measure(const View& view, const kvfolia::Batch& batch, const Cache& cache, int query_heads,
               const float* queries, Exec&& exec) {
    using namespace kvfolia;
    constexpr int dim = View::Layout::key_dim;
    const BatchView all = batch.view();
    for (std::int32_t row = 0; row < batch.rows(); ++row) {
      const SequenceInfo info = *cache.sequence(batch.sequence(row));
      const auto pages = static_cast<std::int32_t>(info.pages.size());
      std::vector<std::int32_t> entries, indptr{0}, lengths, positions, begins;
      for (std::int32_t i = 0; i < pages; ++i) {
        const TablePage& page = info.pages[static_cast<std::size_t>(i)];
        entries.push_back(page.entry.raw);
        indptr.push_back(i + 1);
        lengths.push_back(std::min(info.length - page.begin.value, view.page_tokens));
        positions.push_back(info.length - 1);
        begins.push_back(page.begin.value);
      }
      BatchView single;
      single.rows = pages;
      single.table = {entries.data(), indptr.data()};
      single.lengths = lengths.data();
      single.query_pos = positions.data();
      single.entry_pos = begins.data();
      out_.resize(static_cast<std::size_t>(pages) * query_heads * dim);
      lse_.resize(static_cast<std::size_t>(pages) * query_heads);
      const auto plan = cpu::plan_attend(view, single, {query_heads, exec.concurrency()});
      if (!plan) throw std::runtime_error("the cache refuses: " + plan.error().message());
      workspace_.resize(plan->workspace_bytes());
      AttendArgs args;
      const std::int64_t last = all.query_begin(row + 1) - 1;
      args.queries = {queries + last * query_heads * dim, 0, dim};  // the same one for every page
      args.out = {out_.data(), query_heads * dim, dim};
      args.lse = {lse_.data(), query_heads, 1};
      if (const auto ok = cpu::attend(view, single, args, *plan, workspace_, exec); !ok)
        throw std::runtime_error("the cache refuses: " + ok.error().message());
      for (int head = 0; head < query_heads; ++head) {
        double total = 0.0, largest = -INFINITY;
        for (std::int32_t i = 0; i < pages; ++i) largest = std::fmax(largest, lse(i, head, query_heads));
        for (std::int32_t i = 0; i < pages; ++i) total += std::exp(lse(i, head, query_heads) - largest);
        for (std::int32_t i = 0; i < pages; ++i) {
          Mass& mass = mass_[entries[static_cast<std::size_t>(i)]];
          mass.sum += std::exp(lse(i, head, query_heads) - largest) / total;
          ++mass.looks;
        }
      }
    }
  }

 private:
  double lse(std::int32_t page, int head, int heads) const {
    return lse_[static_cast<std::size_t>(page) * heads + head].value;
  }

  struct Mass {
    double sum = 0.0;
    std::int64_t looks = 0;
  };
  std::unordered_map<std::int32_t, Mass> mass_;
  std::vector<float> out_;
  std::vector<kvfolia::NaturalLse> lse_;
  std::vector<std::byte> workspace_;
};

}  // namespace kvfolia_examples
