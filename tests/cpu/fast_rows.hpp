// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rows over a pool's pages, attended alone or in any company, and held against ref row by row.

#include <algorithm>
#include <utility>

#include "cpu/fast_pools.hpp"
#include "support/catch.hpp"

namespace kvfolia_tests {

using namespace kvfolia;

struct RowSpec {
  int queries;
  int length;
};

/// Where tokens lie in the text: side by side, with gaps between pages, or with gaps between slots.
enum class Positions { dense, gaps, slots };

struct SceneSpec {
  const PoolKind* kind;
  int page_tokens = 16;
  int kv_heads = 2;
  int group = 2;
  Positions positions = Positions::dense;
  bool table_per_head = false;
  bool absent = false;  ///< some entries
  bool heads_inside = false;
  bool coded = false;  ///< no page is exact that need not be
  int shared = 0;      ///< tokens that rows have in common with the first one, fewer for every third row
  std::uint64_t seed = 1;
  std::uint64_t page_seed = 1;  ///< decides which pages rows get, and nothing else
  /// May change a token before it is encoded: of a row, at a position, all heads.
  std::function<void(int, int, std::vector<float>&, std::vector<float>&)> change{};
};

/// What attend() is asked for.
struct Asked {
  float scale = 0.0f;
  float soft_cap = 0.0f;
  bool alibi = false;
  bool sinks = false;
  bool causal = true;
  bool masked = false;
  bool partial = false;
  Window window{};
};

struct RowResult {
  std::vector<float> out, lse;
};
struct RowExpected {
  std::vector<double> out, lse;
};

class Scene {
 public:
  Scene(const SceneSpec& with, const std::vector<RowSpec>& rows) : spec(with) {
    const int page = spec.page_tokens, tables = spec.table_per_head ? spec.kv_heads : 1;
    int pages = 1;
    for (const RowSpec& row : rows) pages += tables * entries_of(row);
    pool = spec.kind->make({spec.kv_heads, page, pages, spec.heads_inside});
    Random shuffle(spec.page_seed);
    free_.resize(static_cast<std::size_t>(pool->formats));
    for (std::vector<int>& ids : free_) {
      for (int i = 0; i < pages; ++i) ids.push_back(i);
      for (int i = pages - 2; i > 0; --i)  // the last page is taken first
        std::swap(ids[static_cast<std::size_t>(i)], ids[static_cast<std::size_t>(shuffle.between(0, i))]);
    }
    for (std::size_t i = 0; i < rows.size(); ++i) add(static_cast<int>(i), rows[i]);
    Random random(spec.seed + 77);
    for (int h = 0; h < heads(); ++h) {
      slopes_.push_back(static_cast<float>(random.uniform() * 0.3));
      sinks_.push_back(3.0f * random.gauss());
    }
  }

  int heads() const { return spec.kv_heads * spec.group; }
  int count() const { return static_cast<int>(rows_.size()); }
  int queries(int row) const { return rows_[static_cast<std::size_t>(row)].queries; }
  std::vector<int> all() const {
    std::vector<int> ids;
    for (int i = 0; i < count(); ++i) ids.push_back(i);
    return ids;
  }
  std::vector<float>& query(int row) { return rows_[static_cast<std::size_t>(row)].query; }
  int first_query(int row) const { return rows_[static_cast<std::size_t>(row)].first_query; }

  /// Attends for some rows together. Queries end with their buffer; between outputs lies what must stay.
  std::vector<RowResult> attend(const std::vector<int>& ids, const Asked& asked, const AnyOrder& order = {},
                                bool plain = false) const {
    Arrays a = assemble(ids, asked);
    const int key_gap = 3, out_gap = 5, lse_gap = 2, n = heads();
    const std::int64_t q_head = pool->key_dim + key_gap, q_token = n * q_head + 1;
    const std::int64_t o_head = pool->value_dim + out_gap, o_token = n * o_head + 1, l_token = n + lse_gap;
    const std::int64_t tokens = a.batch.total_queries();
    const auto size = [&](std::int64_t token, std::int64_t head, std::int64_t dims) {
      return static_cast<std::size_t>(tokens == 0 ? 0 : (tokens - 1) * token + (n - 1) * head + dims);
    };
    std::vector<float> queries(size(q_token, q_head, pool->key_dim), NAN);
    const float mark = -12345.678f;
    std::vector<float> out(size(o_token, o_head, pool->value_dim), mark);
    std::vector<NaturalLse> lse(size(l_token, 1, 1), NaturalLse{mark});
    for (std::int64_t t = 0; t < tokens; ++t)
      for (int h = 0; h < n; ++h)
        std::copy_n(a.queries.data() + (t * n + h) * pool->key_dim, pool->key_dim,
                    queries.data() + t * q_token + h * q_head);
    a.args.queries = {queries.data(), q_token, q_head};
    a.args.out = {out.data(), o_token, o_head};
    a.args.lse = {lse.data(), l_token, 1};
    const std::string wrong = pool->attend(a.batch, a.args, n, asked.window, plain, order);
    INFO(wrong);
    REQUIRE(wrong.empty());

    std::vector<RowResult> results;
    std::int64_t t = 0;
    for (const int id : ids) {
      RowResult r;
      for (int i = 0; i < queries_of(id); ++i, ++t)
        for (int h = 0; h < n; ++h) {
          float* at = out.data() + t * o_token + h * o_head;
          r.out.insert(r.out.end(), at, at + pool->value_dim);
          std::fill_n(at, pool->value_dim, mark);
          NaturalLse& l = lse[static_cast<std::size_t>(t * l_token + h)];
          r.lse.push_back(l.value);
          l.value = mark;
        }
      REQUIRE(std::find(r.out.begin(), r.out.end(), mark) == r.out.end());  // everything was written
      REQUIRE(std::find(r.lse.begin(), r.lse.end(), mark) == r.lse.end());
      results.push_back(std::move(r));
    }
    const bool padding = std::all_of(out.begin(), out.end(), [&](float x) { return x == mark; }) &&
                         std::all_of(lse.begin(), lse.end(), [&](NaturalLse x) { return x.value == mark; });
    REQUIRE(padding);  // and nothing else
    return results;
  }

  std::vector<RowExpected> expect(const std::vector<int>& ids, const Asked& asked) const {
    Arrays a = assemble(ids, asked);
    const int n = heads();
    a.args.queries = {a.queries.data(), std::int64_t{n} * pool->key_dim, pool->key_dim};
    const auto all = pool->ref(a.batch, a.args, n, asked.window);
    REQUIRE(all);
    std::vector<RowExpected> rows;
    auto out = all->out.begin();
    auto lse = all->lse.begin();
    for (const int id : ids) {
      const std::int64_t count = std::int64_t{queries_of(id)} * n;
      rows.push_back({{out, out + count * pool->value_dim}, {lse, lse + count}});
      out += count * pool->value_dim;
      lse += count;
    }
    return rows;
  }

  double tolerance(int row) const {
    return (queries(row) <= 4 ? pool->rounds_few : pool->rounds_many) ? 1e-3 : 1e-5;
  }

  const SceneSpec spec;
  std::unique_ptr<Pool> pool;

 private:
  struct Table {
    std::vector<std::int32_t> entries, pos, used, slot_pos;
  };
  struct Row {
    int queries, length, first_query;
    std::vector<Table> tables;
    std::vector<float> query;
    std::vector<std::uint8_t> mask;
  };
  struct Arrays {
    std::vector<std::int32_t> query_indptr{0}, entries, indptr{0}, lengths, query_pos, pos, used, slot_pos;
    std::vector<float> queries;
    std::vector<std::uint8_t> mask;
    std::vector<std::int64_t> mask_offset;
    BatchView batch;
    AttendArgs args;
  };

  int queries_of(int id) const { return rows_[static_cast<std::size_t>(id)].queries; }
  int entries_of(const RowSpec& row) const {
    const int full = (row.length + spec.page_tokens - 1) / spec.page_tokens;
    return spec.positions == Positions::slots ? full + full / 2 : full;
  }

  void add(int id, const RowSpec& row) {
    Random random(spec.seed * 1000 + static_cast<std::uint64_t>(id));
    Row data{row.queries, row.length, 0, {}, {}, {}};
    int last = 0;
    for (int table = 0; table < (spec.table_per_head ? spec.kv_heads : 1); ++table) {
      data.tables.push_back(make_table(id, row, table, random));
      last = std::max(last, end_of(data.tables.back()));
    }
    if (spec.positions == Positions::dense)
      data.first_query = row.length - row.queries;
    else
      data.first_query = std::max(0, last - row.queries + random.between(0, 3));
    data.query = random.gauss(static_cast<std::size_t>(row.queries * heads() * pool->key_dim));
    const int keys = std::max(0, data.first_query + row.queries);
    data.mask.resize(static_cast<std::size_t>((row.queries * keys + 7) / 8));
    for (std::uint8_t& byte : data.mask) byte = static_cast<std::uint8_t>(random.next() & random.next());
    rows_.push_back(std::move(data));
  }

  int end_of(const Table& table) const {
    for (int i = static_cast<int>(table.entries.size()); i-- > 0;) {
      const auto e = static_cast<std::size_t>(i);
      if (table.used[e] > 0)
        return table.slot_pos[e * page() + static_cast<std::size_t>(table.used[e] - 1)] + 1;
    }
    return 0;
  }
  std::size_t page() const { return static_cast<std::size_t>(spec.page_tokens); }

  Table make_table(int id, const RowSpec& row, int head, Random& random) {
    Table table;
    const int count = entries_of(row);
    int left = row.length, position = 0;
    for (int i = 0; i < count; ++i) {
      if (id > 0 && (i + 1) * spec.page_tokens <= std::min({row.length, rows_[0].length,
                                                            id % 3 == 0 ? spec.shared - 256 : spec.shared})) {
        const Table& first = rows_[0].tables[static_cast<std::size_t>(head)];
        const auto at = static_cast<std::size_t>(i), slots = at * page();
        table.entries.push_back(first.entries[at]);
        table.pos.push_back(first.pos[at]);
        table.used.push_back(first.used[at]);
        table.slot_pos.insert(table.slot_pos.end(),
                              first.slot_pos.begin() + static_cast<std::ptrdiff_t>(slots),
                              first.slot_pos.begin() + static_cast<std::ptrdiff_t>(slots + page()));
        left -= spec.page_tokens;
        position = table.pos.back() + spec.page_tokens;
        continue;
      }
      int used = std::min(left, spec.page_tokens);
      const int behind = (count - 1 - i) * spec.page_tokens;
      if (spec.positions == Positions::slots) used = random.between(std::max(0, left - behind), used);
      left -= used;
      if (spec.positions != Positions::dense && random.between(0, 4) == 0) position += random.between(1, 300);
      table.pos.push_back(position);
      table.used.push_back(used);
      for (int slot = 0; slot < spec.page_tokens; ++slot) {
        table.slot_pos.push_back(slot < used ? position : -1);
        if (slot < used) ++position;
        if (slot < used && spec.positions == Positions::slots && random.between(0, 2) == 0)
          position += random.between(1, 5);
      }
      if (spec.positions == Positions::gaps) position = table.pos.back() + spec.page_tokens;
      table.entries.push_back(make_page(id, head, i, table, random));
    }
    return table;
  }

  std::int32_t make_page(int id, int head, int i, const Table& table, Random& random) {
    const int used = table.used.back();
    if (spec.absent && random.between(0, 5) == 0) return -1 - random.between(0, 1000);
    int format = random.between(0, spec.coded ? 0 : pool->formats - 1);
    if (pool->seal_tokens > 1 && used < spec.page_tokens) format = pool->exact;
    std::vector<int>& ids = free_[static_cast<std::size_t>(format)];
    const int number = ids.back();
    ids.pop_back();
    std::vector<float> keys, values;
    for (int slot = 0; slot < spec.page_tokens; ++slot) {
      const std::uint64_t token =
          ((spec.seed * 64 + static_cast<std::uint64_t>(id)) * 8 + static_cast<std::uint64_t>(head)) *
              100000 +
          static_cast<std::uint64_t>(i * spec.page_tokens + slot);
      Random content(token);
      auto key = content.gauss(static_cast<std::size_t>(spec.kv_heads * pool->key_dim));
      auto value = content.gauss(static_cast<std::size_t>(spec.kv_heads * pool->value_dim));
      if (spec.change && slot < used)
        spec.change(id, table.slot_pos[static_cast<std::size_t>(i) * page() + static_cast<std::size_t>(slot)],
                    key, value);
      keys.insert(keys.end(), key.begin(), key.end());
      values.insert(values.end(), value.begin(), value.end());
    }
    pool->write(format, number, keys.data(), values.data(), used);
    return TableEntry::make(format, PageId{number}).raw;
  }

  Arrays assemble(const std::vector<int>& ids, const Asked& asked) const {
    Arrays a;
    const std::size_t tables = spec.table_per_head ? static_cast<std::size_t>(spec.kv_heads) : 1;
    for (std::size_t table = 0; table < tables; ++table)
      for (const int id : ids) {
        const Row& row = rows_[static_cast<std::size_t>(id)];
        const Table& t = row.tables[table];
        a.entries.insert(a.entries.end(), t.entries.begin(), t.entries.end());
        a.pos.insert(a.pos.end(), t.pos.begin(), t.pos.end());
        a.used.insert(a.used.end(), t.used.begin(), t.used.end());
        a.slot_pos.insert(a.slot_pos.end(), t.slot_pos.begin(), t.slot_pos.end());
        if (table > 0) continue;
        a.query_indptr.push_back(a.query_indptr.back() + row.queries);
        a.indptr.push_back(static_cast<std::int32_t>(a.entries.size()));
        a.lengths.push_back(row.length);
        a.query_pos.push_back(std::max(0, row.first_query));
        a.queries.insert(a.queries.end(), row.query.begin(), row.query.end());
        a.mask_offset.push_back(static_cast<std::int64_t>(a.mask.size()));
        a.mask.insert(a.mask.end(), row.mask.begin(), row.mask.end());
      }
    a.batch.rows = static_cast<std::int32_t>(ids.size());
    a.batch.query_indptr = a.query_indptr.data();
    a.batch.table = {a.entries.data(), a.indptr.data(), 0, tables > 1 ? a.indptr.back() : 0};
    a.batch.lengths = a.lengths.data();
    if (spec.positions != Positions::dense) {
      a.batch.query_pos = a.query_pos.data();
      a.batch.entry_pos = a.pos.data();
    }
    if (spec.positions == Positions::slots) {
      a.batch.entry_tokens = a.used.data();
      a.batch.slot_pos = a.slot_pos.data();
    }
    a.args.scale = asked.scale != 0.0f ? asked.scale : pool->shares ? 0.125f : 0.0f;
    a.args.soft_cap = asked.soft_cap;
    if (asked.alibi) a.args.alibi_slopes = slopes_.data();
    if (asked.sinks) a.args.sink_logits = sinks_.data();
    a.args.causal = asked.causal;
    if (asked.masked) a.args.mask = {a.mask.data(), a.mask_offset.data()};
    a.args.partial = asked.partial;
    return a;
  }

  std::vector<Row> rows_;
  std::vector<std::vector<int>> free_;
  std::vector<float> slopes_, sinks_;
};

struct Distance {
  double relative = 0.0;  ///< L2, of what is finite
  double lse = 0.0;       ///< absolute, beyond two units in the last place of a float
  int wrongly_finite = 0, wrongly_not = 0;
};

inline Distance distance(const RowResult& got, const RowExpected& expected) {
  Distance d;
  double error = 0.0, norm = 0.0;
  const auto compare = [&](float x, double right, auto&& add) {
    if (std::isfinite(right) != std::isfinite(x))
      ++(std::isfinite(right) ? d.wrongly_not : d.wrongly_finite);
    else if (std::isfinite(right))
      add(double{x} - right, right);
  };
  REQUIRE(got.out.size() == expected.out.size());
  for (std::size_t i = 0; i < got.out.size(); ++i)
    compare(got.out[i], expected.out[i],
            [&](double e, double right) { error += e * e, norm += right * right; });
  for (std::size_t i = 0; i < got.lse.size(); ++i)
    if (expected.lse[i] == -INFINITY)  // no key, which is not an error
      d.wrongly_finite += got.lse[i] != -INFINITY;
    else
      compare(got.lse[i], expected.lse[i], [&](double e, double right) {
        d.lse = std::max(d.lse, std::fabs(e) - std::fabs(right) * 0x1p-22);
      });
  d.relative = norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
  return d;
}

/// Attends for all rows at once and holds each against ref.
inline void check_scene(const Scene& scene, const Asked& asked, const AnyOrder& order = {}) {
  const auto got = scene.attend(scene.all(), asked, order);
  const auto expected = scene.expect(scene.all(), asked);
  for (int row = 0; row < scene.count(); ++row) {
    const Distance d = distance(got[static_cast<std::size_t>(row)], expected[static_cast<std::size_t>(row)]);
    CAPTURE(row, scene.queries(row));
    CHECK(d.wrongly_finite == 0);
    CHECK(d.wrongly_not == 0);
    CHECK(d.relative <= scene.tolerance(row));
    CHECK(d.lse <= scene.tolerance(row));
  }
}

inline bool same_bits(const RowResult& a, const RowResult& b) {
  return a.out.size() == b.out.size() && a.lse.size() == b.lse.size() &&
         std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

}  // namespace kvfolia_tests
