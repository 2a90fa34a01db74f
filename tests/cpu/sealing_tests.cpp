// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Pages that are coded as a whole: their bytes, attention over tables of all formats, and recodes that
// an engine made wrongly.

#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

using Bytes = std::vector<std::byte>;

/// A page's bytes, all layers.
template <class C>
Bytes bytes_of(C& cache, TableEntry entry) {
  Bytes bytes;
  const int format = entry.format();
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    const std::byte* data =
        cache.store().data(format, layer) + entry.page().value * cache.store().page_stride(format);
    bytes.insert(bytes.end(), data, data + cache.store().page_bytes(format) / cache.shape().layers);
  }
  return bytes;
}

/// All bytes of a cache.
template <class C>
std::vector<Bytes> all_bytes(C& cache) {
  std::vector<Bytes> all;
  for (int format = 0; format < format_count<typename C::Quant>; ++format)
    for (std::int32_t page = 0; page < cache.pool(format).pages(); ++page)
      all.push_back(bytes_of(cache, TableEntry::make(format, PageId{page})));
  return all;
}

/// The texts of some sequences: keys and values, [layer][token][head][dim], with a bias in every channel.
template <class Layout>
struct Text {
  static constexpr int layers = 2, heads = 2;
  std::vector<std::vector<float>> keys, values;

  Text(Random& random, int tokens) {
    for (int layer = 0; layer < layers; ++layer) {
      const auto count = static_cast<std::size_t>(tokens * heads);
      keys.push_back(random.gauss(count * Layout::key_dim));
      values.push_back(random.gauss(count * Layout::value_dim));
      for (std::size_t i = 0; i < keys.back().size(); ++i) keys.back()[i] += static_cast<float>(i % 7) - 2.0f;
    }
  }
  AppendArgs from(int layer, int token) const {
    AppendArgs args;
    const auto l = static_cast<std::size_t>(layer);
    args.keys = {keys[l].data() + token * heads * Layout::key_dim, heads * Layout::key_dim, Layout::key_dim};
    args.values = {values[l].data() + token * heads * Layout::value_dim, heads * Layout::value_dim,
                   Layout::value_dim};
    return args;
  }
};

/// Carries out a batch of one row.
template <class C, class Layout>
void write(C& cache, const Batch& batch, const Text<Layout>& text) {
  cache.store().copy(batch.copies(), Backwards{});
  const int first = batch.rows() > 0 ? batch.view().query_pos[0] : 0;
  for (int layer = 0; layer < Text<Layout>::layers; ++layer)
    REQUIRE(cpu::append(cache.view(LayerId{layer}), batch, text.from(layer, first), Backwards{}));
}

template <class C, class Layout>
SeqId append_in(C& cache, const Text<Layout>& text, const std::vector<int>& chunks) {
  SeqId id{};
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Step step = cache.begin_step();
    if (i == 0) id = *step.create();
    REQUIRE(step.extend(id, chunks[i]));
    write(cache, step.commit(), text);
  }
  return id;
}

template <class C>
std::vector<TableEntry> table_of(const C& cache, SeqId id) {
  std::vector<TableEntry> table;
  const SequenceInfo info = *cache.sequence(id);
  for (const TablePage& page : info.pages) table.push_back(page.entry);
  return table;
}

/// Bytes of all pages but an unfinished last one.
template <class C>
std::vector<Bytes> full_pages(C& cache, SeqId id) {
  std::vector<Bytes> pages;
  const std::vector<TableEntry> table = table_of(cache, id);
  const int full = cache.sequence(id)->length / cache.page_tokens();
  for (int page = 0; page < full; ++page) {
    CHECK(table[static_cast<std::size_t>(page)].format() == coded_format);
    pages.push_back(bytes_of(cache, table[static_cast<std::size_t>(page)]));
  }
  return pages;
}

constexpr int text_tokens = 53;

template <class Layout, class Quant>
PagedCache<Layout, Quant> new_cache() {
  PagedCache<Layout, Quant> cache({.shape = {Text<Layout>::layers, Text<Layout>::heads, dynamic},
                                   .pages = 200,
                                   .exact_pages = 60,
                                   .low_pages = is_mixed<Quant> ? 60 : 0});
  // Whatever lies in a page's padding stays there.
  for (int format = 0; format < format_count<Quant>; ++format)
    std::memset(cache.store().data(format, 0), 0xff,
                static_cast<std::size_t>(cache.store().page_bytes(format) * cache.pool(format).pages()));
  return cache;
}

/// One side's full page as encode() itself writes it, from values rounded as exact pages round them (where
/// pages are coded as a whole), after the rotation. Plain memory, laid out as SlotMajor.
template <class Q>
std::pair<Bytes, Bytes> encoded(const Q& quant, bool rounded, const std::vector<float>& plane,
                                int first_token, int head, int heads, int dims, int page_tokens) {
  std::vector<float> rows;
  for (int t = 0; t < page_tokens; ++t) {
    const float* from = plane.data() + ((first_token + t) * heads + head) * dims;
    std::vector<float> row(from, from + dims);
    to_stored(quant, row.data(), dims);
    for (const float x : row) rows.push_back(rounded ? static_cast<float>(fp16(x)) : x);
  }
  Bytes codes(static_cast<std::size_t>(code_bytes<Q>(dims) * page_tokens));
  Bytes params(static_cast<std::size_t>(Q::param_bytes(dims, page_tokens)));
  const Tile<SlotMajor, std::byte> tile{
      codes.data(), params.data(),       dims,
      page_tokens,  code_bytes<Q>(dims), Q::param_bytes(dims, page_tokens) / page_tokens};
  quant.encode(tile, 0, page_tokens, Rows{rows.data(), dims});
  return {codes, params};
}

template <class T>
bool starts_with(const std::byte* memory, const T& bytes) {
  return std::memcmp(memory, bytes.data(), bytes.size()) == 0;
}

/// Pages of one format hold what encode() gives for the text from `first_token` on.
template <class Layout, class Quant, class Q>
void check_encoded(const PagedView<Layout, Quant>& view, const Q& quant, TableEntry entry,
                   const Text<Layout>& text, int layer, int first_token, bool rounded) {
  const auto l = static_cast<std::size_t>(layer);
  int wrong = 0;
  for (int head = 0; head < view.kv_heads; ++head) {
    const auto key_tile = view.key_tile(entry, head);
    const auto keys = encoded(key_side(quant), rounded, text.keys[l], first_token, head, view.kv_heads,
                              Layout::key_dim, view.page_tokens);
    wrong += !starts_with(key_tile.codes, keys.first) + !starts_with(key_tile.params, keys.second);
    if constexpr (!Layout::shares_key_value) {
      const auto value_tile = view.value_tile(entry, head);
      const auto values = encoded(value_side(quant), rounded, text.values[l], first_token, head,
                                  view.kv_heads, Layout::value_dim, view.page_tokens);
      wrong += !starts_with(value_tile.codes, values.first) + !starts_with(value_tile.params, values.second);
    }
  }
  CHECK(wrong == 0);
}

/// However a text arrives, its sealed pages have the same bytes.
template <class Layout, class Quant>
void check_arrivals() {
  auto cache = new_cache<Layout, Quant>();
  Random random(99);
  const Text<Layout> text(random, text_tokens);
  const int page = cache.page_tokens();
  const SeqId whole = append_in(cache, text, {text_tokens});
  const std::vector<Bytes> expected = full_pages(cache, whole);
  REQUIRE(static_cast<int>(expected.size()) == text_tokens / page);
  for (int layer = 0; layer < Text<Layout>::layers; ++layer)
    for (int p = 0; p < text_tokens / page; ++p)
      check_encoded(cache.view(LayerId{layer}), format_quant<coded_format>(cache.quant()),
                    table_of(cache, whole)[static_cast<std::size_t>(p)], text, layer, p * page,
                    Quant::seal_tokens > 1);

  const auto release = [&](SeqId id) {
    Step step = cache.begin_step();
    REQUIRE(step.release(id));
    step.commit();
  };
  const auto check = [&](const std::vector<int>& chunks) {
    CAPTURE(chunks);
    const SeqId id = append_in(cache, text, chunks);
    CHECK((full_pages(cache, id) == expected));
    release(id);
  };
  check(std::vector<int>(text_tokens, 1));
  check({page - 1, 1, page + 1, page - 1, text_tokens - 3 * page});
  check({page, page, text_tokens - 2 * page});
  for (int i = 0; i < 6; ++i) {
    std::vector<int> chunks;
    for (int rest = text_tokens; rest > 0; rest -= chunks.back())
      chunks.push_back(random.between(0, std::min(rest, 19)));
    check(chunks);
  }

  // Several extends in a step, tokens taken back and added again, before any of them is written.
  const SeqId busy = append_in(cache, text, {page / 2 + 1});
  for (int length = page / 2 + 1; length < text_tokens;) {
    Step step = cache.begin_step();
    const int end = std::min(text_tokens, length + page + 3);
    REQUIRE(step.extend(busy, 1));
    REQUIRE(step.extend(busy, end - length - 1));
    REQUIRE(step.extend(busy, 2 * page));
    REQUIRE(step.truncate(busy, length));
    REQUIRE(step.extend(busy, end - length));
    write(cache, step.commit(), text);
    length = end;
  }
  CHECK((full_pages(cache, busy) == expected));

  // Forks in between; the parent goes on first, last, or is gone.
  for (const int order : {0, 1, 2}) {
    SeqId id = append_in(cache, text, {page + page / 2});
    for (int length = page + page / 2; length < text_tokens;) {
      const int tokens = std::min(text_tokens - length, 5);
      SeqId child{};
      Step step = cache.begin_step();
      child = *step.fork(id);
      if (order == 2) REQUIRE(step.release(id));
      step.commit();
      const auto grow = [&](SeqId seq) {
        Step more = cache.begin_step();
        REQUIRE(more.extend(seq, tokens));
        write(cache, more.commit(), text);
      };
      if (order == 0) grow(id);
      grow(child);
      if (order == 1) grow(id);
      length += tokens;
      if (order != 2) {
        CHECK((full_pages(cache, id) == full_pages(cache, child)));
        release(order == 0 ? child : id);
      }
      id = order == 0 ? id : child;
    }
    CHECK((full_pages(cache, id) == expected));
    release(id);
  }

  // Cut at a page's border and grown again.
  const SeqId cut = append_in(cache, text, {text_tokens});
  Step back = cache.begin_step();
  REQUIRE(back.truncate(cut, page));
  REQUIRE(back.extend(cut, page / 2));
  write(cache, back.commit(), text);
  Step again = cache.begin_step();
  REQUIRE(again.extend(cut, text_tokens - page - page / 2));
  write(cache, again.commit(), text);
  CHECK((full_pages(cache, cut) == expected));
  CHECK(cache.verify().empty());
}

/// In one step or in two, opening a page and sealing it again gives the same bytes.
template <class Layout, class Quant>
void check_reopened() {
  auto cache = new_cache<Layout, Quant>();
  Random random(7);
  const Text<Layout> text(random, text_tokens);
  const int page = cache.page_tokens();
  const SeqId two = append_in(cache, text, {2 * page + 1}), one = append_in(cache, text, {2 * page + 1});
  const auto before = full_pages(cache, one);
  {
    Step step = cache.begin_step();
    REQUIRE(step.truncate(two, page + 3));
    write(cache, step.commit(), text);
    Step next = cache.begin_step();
    REQUIRE(next.extend(two, page));
    write(cache, next.commit(), text);
  }
  Step step = cache.begin_step();
  REQUIRE(step.truncate(one, page + 3));
  REQUIRE(step.extend(one, page));
  write(cache, step.commit(), text);
  const auto after = full_pages(cache, one);
  CHECK((after == full_pages(cache, two)));
  CHECK((after[0] == before[0]));

  // A page opened and not yet full holds exactly what the coded one decoded to, rounded.
  const SeqId source = append_in(cache, text, {page});
  Step fork = cache.begin_step();
  const SeqId opened = *fork.fork(source);
  REQUIRE(fork.truncate(opened, page - 1));
  write(cache, fork.commit(), text);
  const TableEntry coded = table_of(cache, source)[0], open = table_of(cache, opened)[0];
  CHECK(open.format() == (Quant::seal_tokens > 1 ? exact_format<Quant> : coded_format));
  if constexpr (Quant::seal_tokens > 1) {
    const auto view = cache.view(LayerId{1});
    float from[Layout::key_dim], to[Layout::key_dim];
    int wrong = 0;
    for (int head = 0; head < 2; ++head)
      for (int slot = 0; slot < page - 1; ++slot) {
        key_side(format_quant<coded_format>(cache.quant())).decode(view.key_tile(coded, head), slot, from);
        key_side(typename Quant::Exact{}).decode(view.key_tile(open, head), slot, to);
        for (int d = 0; d < Layout::key_dim; ++d) wrong += to[d] != static_cast<float>(fp16(from[d]));
      }
    CHECK(wrong == 0);
  }
}

template <template <int> class LayoutOf, class Quant>
void check_bytes() {
  check_arrivals<LayoutOf<8>, Quant>();
  check_arrivals<LayoutOf<16>, Quant>();
  check_reopened<LayoutOf<8>, Quant>();
  check_reopened<LayoutOf<16>, Quant>();
}
template <int PageTokens>
using Heads = Gqa<16, PageTokens>;
template <int PageTokens>
using Latent = Mla<16, 8, PageTokens>;

using Kivi = KeyValue<Int4Channels<4>, Rotated<Int4<0>>>;
using AllRotated = KeyValue<Rotated<Centered<Int4<0>, 8>>, Rotated<Int4<0>>>;
using TwoRates = Mixed<Int8, KeyValue<Int4Channels<8>, Int4<0>>>;

}  // namespace

TEST_CASE("sealed bytes do not depend on how tokens arrived: keys by channel") {
  check_bytes<Heads, Int4Channels<8>>();
}
TEST_CASE("sealed bytes do not depend on how tokens arrived: centred") {
  check_bytes<Heads, Centered<Int8, 8>>();
}
TEST_CASE("sealed bytes do not depend on how tokens arrived: centred keys alone") {
  check_bytes<Heads, KeyValue<Centered<Int8, 8>, Int8>>();
}
TEST_CASE("sealed bytes do not depend on how tokens arrived: keys by channel, values rotated") {
  check_bytes<Heads, Kivi>();
}
TEST_CASE("sealed bytes do not depend on how tokens arrived: both rotated, keys centred") {
  check_bytes<Heads, AllRotated>();
}
TEST_CASE("bytes of a high format that is coded token by token do not depend on how tokens arrived") {
  check_arrivals<Heads<8>, TwoRates>();
  check_arrivals<Heads<16>, TwoRates>();
}
TEST_CASE("sealed bytes do not depend on how tokens arrived: latent, rotated and centred") {
  check_bytes<Latent, Rotated<Centered<Int8, 8>, 8>>();
}

TEST_CASE("a demoted page holds what encode() gives for the decoded high page") {
  auto cache = new_cache<Heads<16>, TwoRates>();
  Random random(5);
  Text<Heads<16>> text(random, 40);
  const SeqId id = append_in(cache, text, {40});
  const TableEntry high = table_of(cache, id)[1];
  const Bytes high_bytes = bytes_of(cache, high);
  const auto before = full_pages(cache, id);
  // What the high page decodes to is the low page's text.
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head)
      for (int slot = 0; slot < 16; ++slot) {
        const auto view = cache.view(LayerId{layer});
        const auto l = static_cast<std::size_t>(layer);
        const int at = ((16 + slot) * 2 + head) * 16;
        cache.quant().high.decode(view.key_tile(high, head), slot, text.keys[l].data() + at);
        cache.quant().high.decode(view.value_tile(high, head), slot, text.values[l].data() + at);
      }
  Step step = cache.begin_step();
  REQUIRE(step.demote(id, 1));
  const Batch batch = step.commit();
  write(cache, batch, text);
  const TableEntry low = table_of(cache, id)[1];
  REQUIRE(low.format() == low_format<TwoRates>);
  for (int layer = 0; layer < 2; ++layer)
    check_encoded(cache.view(LayerId{layer}), cache.quant().low, low, text, layer, 16, true);
  CHECK((bytes_of(cache, high) == high_bytes));
  CHECK((bytes_of(cache, table_of(cache, id)[0]) == before[0]));
}

// Attention over tables of all formats.

namespace {

struct Setup {
  int kv_heads = 2;
  int group = 3;
  int page_tokens = dynamic;
  int exact_sink_pages = 0;
  bool page_major = false;
};

/// Ragged sequences grow, some are demoted, cut and forked; after every step all rows attend.
template <class Layout, class Quant, class Evict = KeepAll>
void check_mixed_tables(const Setup& setup, Evict evict = {}) {
  Random random(2025);
  PagedCache<Layout, Quant, Evict> cache(
      {.shape = {2, setup.kv_heads, setup.page_tokens},
       .pages = 300,
       .exact_pages = 100,
       .low_pages = is_mixed<Quant> ? 60 : 0,
       .exact_sink_pages = setup.exact_sink_pages,
       .order = setup.page_major ? StorageOrder::page_major : StorageOrder::layer_major},
      {}, evict);
  poison(cache);
  const int page = cache.page_tokens(), heads = setup.kv_heads * setup.group;
  std::vector<SeqId> sequences;
  std::vector<int> formats(3, 0);
  const std::vector<std::vector<int>> steps = {{1, page - 1, page, page + 1, 3 * page + 2, 300, 0},
                                               {1, 1, 1, 1, 1, 1, 1},
                                               {5, 1, 0, page, 2, 1, 1},
                                               {1, 1, page - 1, 1, 2 * page, 40, 1},
                                               {1, 2, 3, 4, 5, 6, 7}};
  for (std::size_t number = 0; number < steps.size(); ++number) {
    Step step = cache.begin_step();
    for (std::size_t i = 0; i < steps[number].size(); ++i) {
      if (sequences.size() == i) sequences.push_back(*step.create());
      const SeqId id = sequences[i];
      const SequenceInfo info = *cache.sequence(id);
      if (is_mixed<Quant>)
        for (std::int32_t p = static_cast<std::int32_t>(number % 2);
             p < static_cast<std::int32_t>(info.pages.size()); p += 3)
          static_cast<void>(step.demote(id, p));
      if (number == 3 && i % 2 == 1 && info.length > 2)
        if (const auto cut = step.truncate(id, info.length - 2); !cut)
          CHECK(cut.error().code == Errc::position_evicted);
      REQUIRE(step.extend(id, steps[number][i]));
      const SequenceInfo now = *cache.sequence(id);
      for (const TablePage& p : now.pages) ++formats[static_cast<std::size_t>(p.entry.format())];
    }
    if (number == 2) {
      // A fork seals the shared tail, or copies it.
      const SeqId child = *step.fork(sequences[2]);
      REQUIRE(step.extend(child, page / 2 + 1));
    }
    const Batch batch = run_step(cache, std::move(step), random);
    for (int layer = 0; layer < 2; ++layer) {
      Attention a = Attention::make<Layout>(random, batch.tokens(), heads);
      check_attend(cache.view(LayerId{layer}), batch, a, heads);
    }
    CHECK(cache.verify().empty());
  }
  if (Quant::seal_tokens > 1) CHECK(formats[exact_format<Quant>] > 0);
  if (is_mixed<Quant>) CHECK(formats[static_cast<std::size_t>(low_format<Quant>)] > 0);
}

}  // namespace

TEST_CASE("attention over coded pages and exact tails agrees with ref: keys by channel") {
  check_mixed_tables<Gqa<16, 8>, Int4Channels<8>>({});
  check_mixed_tables<Gqa<64, 16>, Int4Channels<8>>({.group = 1, .exact_sink_pages = 1}, SinkWindow{4, 20});
  check_mixed_tables<Gqa<64, dynamic, DimMajor<4>, DimMajor<2>>, Int4Channels<8>>(
      {.page_tokens = 24, .page_major = true});
}
TEST_CASE("attention over coded pages and exact tails agrees with ref: centred") {
  check_mixed_tables<Gqa<16, 8>, Centered<Int8, 8>>({.group = 4});
  check_mixed_tables<Gqa<64, dynamic, DimMajor<4>, SlotPairs<2>>, KeyValue<Centered<Int8, 8>, Int8>>(
      {.page_tokens = 16, .exact_sink_pages = 1}, SinkWindow{3, 33});
}
TEST_CASE("attention over coded pages and exact tails agrees with ref: rotated") {
  check_mixed_tables<Gqa<16, 8>, Kivi>({});
  check_mixed_tables<Gqa<64, 16>, AllRotated>({.kv_heads = 1, .group = 8, .exact_sink_pages = 2},
                                              SinkWindow{17, 40});
  check_mixed_tables<Gqa<48, 16>, AllRotated>({.kv_heads = 3, .group = 1, .page_major = true});
}
TEST_CASE("attention over blocks of keys and values of different lengths agrees with ref") {
  check_mixed_tables<Gqa<16, 12>, KeyValue<Int4Channels<6>, Centered<Int8, 3>>>({}, SinkWindow{1, 30});
  check_mixed_tables<Gqa<24, 12>, KeyValue<Centered<Int4<8>, 2>, Int4Channels<12>>>({.exact_sink_pages = 1});
}
TEST_CASE("attention over exact, high and low pages agrees with ref") {
  check_mixed_tables<Gqa<16, 8>, TwoRates>({.exact_sink_pages = 1});
  check_mixed_tables<Gqa<16, 16>, TwoRates>({}, SinkWindow{4, 50});
  check_mixed_tables<Gqa<64, 8>,
                     Mixed<KeyValue<Centered<Int8, 8>, Int8>, KeyValue<Int4Channels<4>, Int4<0>>>>(
      {.exact_sink_pages = 1, .page_major = true});
  check_mixed_tables<Gqa<32, 8>, Mixed<AllRotated, Rotated<Int4<8>>>>({.group = 2}, SinkWindow{2, 70});
  check_mixed_tables<Gqa<16, 8>, Mixed<Identity<fp16>, Int4Channels<8>>>({.exact_sink_pages = 1});
}
TEST_CASE("attention over latent pages of all kinds agrees with ref") {
  check_mixed_tables<Mla<64, 16, 16>, Int8>({.kv_heads = 1, .group = 16, .exact_sink_pages = 1});
  check_mixed_tables<Mla<64, 16, 8>, Centered<Int8, 8>>({.kv_heads = 1, .group = 5}, SinkWindow{4, 33});
  check_mixed_tables<Mla<64, 16, 16, DimMajor<4>>, Centered<Int8, 8>>({.kv_heads = 2, .group = 2});
  check_mixed_tables<Mla<64, 16, 16>, Rotated<Int8, 16>>({.kv_heads = 1, .group = 7, .exact_sink_pages = 1});
  check_mixed_tables<Mla<48, 16, 8>, Mixed<Rotated<Centered<Int8, 4>, 16>, Rotated<Int4<0>, 16>>>(
      {.kv_heads = 1, .group = 3}, SinkWindow{1, 60});
  check_mixed_tables<Mla<64, 16, 8>, Int4Channels<8>>({.kv_heads = 1, .group = 16});
}

TEST_CASE("every feature of attention agrees with ref over sealed pages") {
  constexpr int heads = 6;
  PagedCache<Gqa<16, 8>, AllRotated> cache({.shape = {1, 2, dynamic}, .pages = 40, .exact_pages = 8});
  poison(cache);
  Random random(4);
  Step step = cache.begin_step();
  const SeqId first = *step.create(), second = *step.create();
  REQUIRE((step.extend(first, 5) && step.extend(second, 100)));
  run_step(cache, std::move(step), random);
  Step next = cache.begin_step();
  REQUIRE((next.extend(first, 20) && next.extend(second, 5)));
  const Batch batch = run_step(cache, std::move(next), random);
  const float slopes[heads] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.0f, 1.0f};
  const float sinks[heads] = {-2.0f, 0.0f, 1.0f, 4.0f, 3.0f, -100.0f};
  Attention a = Attention::make<Gqa<16, 8>>(random, batch.tokens(), heads);
  a.args.alibi_slopes = slopes;
  a.args.sink_logits = sinks;
  a.args.soft_cap = 3.0f;
  a.args.scale = 0.2f;
  auto view = cache.view(LayerId{0});
  check_attend(view, batch, a, heads);
  view.window = {.left = 11, .sink_tokens = 3};
  check_attend(view, batch, a, heads);
  std::vector<std::uint8_t> bits((20 * 25 + 7) / 8 + (5 * 105 + 7) / 8);
  for (std::uint8_t& byte : bits) byte = static_cast<std::uint8_t>(random.next());
  const std::int64_t offsets[] = {0, (20 * 25 + 7) / 8};
  a.args.mask = {bits.data(), offsets};
  a.args.causal = false;
  check_attend(view, batch, a, heads);
}

namespace {

/// Five workers, one after the other.
struct Many {
  int concurrency() const { return 5; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    for (std::int64_t i = n; i-- > 0;) f(i, static_cast<int>(i % 5));
  }
};

}  // namespace

TEST_CASE("threads change no bit of attention over sealed pages") {
  PagedCache<Gqa<16, 8>, Mixed<AllRotated, Rotated<Int4<0>>>> cache(
      {.shape = {1, 1, dynamic}, .pages = 120, .exact_pages = 8, .low_pages = 40});
  Random random(8);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 700));
  run_step(cache, std::move(step), random);
  Step next = cache.begin_step();
  for (int page = 0; page < 80; page += 3) REQUIRE(next.demote(id, page));
  REQUIRE(next.extend(id, 3));
  const Batch batch = run_step(cache, std::move(next), random);
  const auto view = cache.view(LayerId{0});
  Attention a = Attention::make<Gqa<16, 8>>(random, 3, 2);
  check_attend(view, batch, a, 2);
  const std::vector<float> alone = a.out;
  const auto plan = cpu::plan_attend(view, batch, {2, 5});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  REQUIRE(cpu::attend(view, batch, a.args, *plan, workspace, Many{}));
  CHECK((a.out == alone));
}

TEST_CASE("a block with a value that is not finite spoils no query that sees none of it") {
  // Eight queries over two pages; the sixth token has an infinite value. The first four see the first page.
  using Layout = Gqa<8, 4>;
  const auto check = [](auto quant) {
    using Quant = decltype(quant);
    PagedCache<Layout, Quant> cache({.shape = {1, 1, dynamic}, .pages = 4, .exact_pages = 4});
    Random random(1);
    Step step = cache.begin_step();
    REQUIRE(step.extend(*step.create(), 8));
    const Batch batch = step.commit();
    auto tokens = random_tokens<Layout>(random, 8, 1);
    tokens.values[6 * 8 + 3] = INFINITY;
    const auto view = cache.view(LayerId{0});
    const auto appended = cpu::append(view, batch, tokens.args(1), cpu::serial);
    if (is_checked) {
      CHECK(appended.error().code == Errc::non_finite_input);
      return;
    }
    REQUIRE(appended);
    Attention a = Attention::make<Layout>(random, 8, 1);
    const auto plan = cpu::plan_attend(view, batch, {1, 1});
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(cpu::attend(view, batch, a.args, *plan, workspace, cpu::serial));
    int spoiled = 0;
    for (std::size_t i = 0; i < 4 * 8; ++i) spoiled += std::isnan(a.out[i]);
    CHECK(spoiled == 0);
    CHECK(std::isnan(a.out[7 * 8 + 3]));
  };
  check(Int8{});
  check(Centered<Int8, 4>{});
  check(Int4Channels<4>{});
}

TEST_CASE("partial results of a rotated cache merge to the whole") {
  constexpr int heads = 4, dims = 16;
  using Layout = Gqa<dims, 8>;
  using Quant = Mixed<AllRotated, Rotated<Int4<0>>>;
  PagedCache<Layout, Quant> cache(
      {.shape = {1, 2, dynamic}, .pages = 20, .exact_pages = 4, .low_pages = 8, .exact_sink_pages = 1});
  poison(cache);
  Random random(3);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 60));
  run_step(cache, std::move(step), random);
  Step next = cache.begin_step();
  REQUIRE((next.demote(id, 2) && next.demote(id, 4) && next.extend(id, 3)));
  const Batch batch = run_step(cache, std::move(next), random);
  const auto view = cache.view(LayerId{0});
  const float sinks[heads] = {-2.0f, 0.0f, 1.0f, 4.0f};
  Attention whole = Attention::make<Layout>(random, 3, heads);
  whole.args.sink_logits = sinks;
  check_attend(view, batch, whole, heads);

  // The table's pages in three parts, any of them; positions say where they belong.
  const auto table = table_of(cache, id);
  REQUIRE(table.size() == 8);
  const std::vector<std::vector<int>> parts = {{0, 2, 5}, {1, 3, 4}, {6, 7}};
  Attention merged;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    std::vector<std::int32_t> entries, positions;
    for (const int page : parts[part]) {
      entries.push_back(table[static_cast<std::size_t>(page)].raw);
      positions.push_back(page * 8);
    }
    const std::int32_t queries[] = {0, 3}, indptr[] = {0, static_cast<std::int32_t>(entries.size())};
    const std::int32_t length[] = {part == 2 ? 15 : 24}, first[] = {60};
    BatchView some;
    some.rows = 1;
    some.query_indptr = queries;
    some.table = {entries.data(), indptr};
    some.lengths = length;
    some.query_pos = first;
    some.entry_pos = positions.data();
    Attention a = Attention::make<Layout>(random, 3, heads);
    a.queries = whole.queries;
    a.args.queries.data = a.queries.data();
    a.args.sink_logits = sinks;
    a.args.partial = true;
    check_attend(view, some, a, heads);
    if (part == 0) {
      merged = std::move(a);
      continue;
    }
    MergeArgs merge{.tokens = 3, .query_heads = heads, .value_dim = dims};
    merge.out = merged.args.out;
    merge.lse = merged.args.lse;
    merge.other_out = {a.out.data(), heads * dims, dims};
    merge.other_lse = a.args.lse;
    REQUIRE(cpu::merge(merge, cpu::serial));
  }
  FinishArgs finish{.tokens = 3, .query_heads = heads, .value_dim = dims};
  finish.partial_out = {merged.out.data(), heads * dims, dims};
  finish.partial_lse = finish.lse = merged.args.lse;
  finish.out = merged.args.out;
  finish.sink_logits = sinks;
  REQUIRE(cpu::finish(finish, cpu::serial));
  for (std::size_t i = 0; i < whole.out.size(); ++i)
    CHECK(merged.out[i] == Approx(whole.out[i]).margin(1e-5));
  for (std::size_t i = 0; i < whole.lse.size(); ++i)
    CHECK(merged.lse[i].value == Approx(whole.lse[i].value).margin(1e-5));
}

// Latent tokens in sections.

namespace {

using Latent576 = Mla<512, 64, dynamic>;
template <int Skip>
using LatentSections = Sections<Section<Fp8Blocks<fp8_e4m3, 128>, 512>, Section<Identity<bf16>, 64, Skip>>;

}  // namespace

TEST_CASE("latent tokens in sections take 656 bytes and agree with ref on pages of the cache") {
  STATIC_REQUIRE(LatentSections<0>::code_bytes(576) == 512 + 128);
  STATIC_REQUIRE(LatentSections<0>::param_bytes(576, 1) == 16);
  constexpr double bits = bits_per_value<Latent576, LatentSections<0>>(64);
  STATIC_REQUIRE(bits == 656.0 * 8 / 576);
  check_mixed_tables<Latent576, LatentSections<0>>({.kv_heads = 1, .group = 16, .page_tokens = 16});
  check_mixed_tables<Latent576, LatentSections<0>>(
      {.kv_heads = 1, .group = 3, .page_tokens = 5, .exact_sink_pages = 1}, SinkWindow{4, 40});
}

TEST_CASE("an engine's tokens of 656 bytes are read and written in place") {
  constexpr int bytes = 512 + 16 + 128, page = 4, pages = 3;
  std::vector<float> storage(bytes * page * pages / 4);  // aligned
  auto* memory = reinterpret_cast<std::byte*>(storage.data());
  std::memset(memory, 0xff, bytes * page * pages);
  PagedView<Latent576, LatentSections<16>> view{};
  view.page_tokens = page;
  view.formats[0].keys = {memory, bytes * page, 0, bytes};
  view.formats[0].key_params = {memory + 512, bytes * page, 0, bytes};
  view.formats[0].pages = pages;

  // Filled in by hand: token t has codes of value (d % 16 - 8) / 8 * 2^(block - 1), and d / 4 behind them.
  const auto fill = [&](int slot, float factor) {
    std::byte* token = memory + slot * bytes;
    for (int d = 0; d < 512; ++d) {
      const fp8_e4m3 code(static_cast<float>(d % 16 - 8) / 8.0f);
      std::memcpy(token + d, &code, 1);
    }
    for (int block = 0; block < 4; ++block) {
      const float scale = factor * static_cast<float>(1 << block) * 0.5f;
      std::memcpy(token + 512 + 4 * block, &scale, 4);
    }
    for (int d = 0; d < 64; ++d) {
      const bf16 rope(factor * static_cast<float>(d) * 0.25f);
      std::memcpy(token + 528 + 2 * d, &rope, 2);
    }
  };
  const auto value = [](int d, float factor) {
    return d < 512 ? factor * static_cast<float>(d % 16 - 8) / 8.0f * static_cast<float>(1 << d / 128) * 0.5f
                   : factor * static_cast<float>(d - 512) * 0.25f;
  };
  const int table[] = {2, 0};  // tokens 0..3 in page 2, token 4 in page 0
  for (int t = 0; t < 5; ++t) fill(table[t / 4] * page + t % 4, static_cast<float>(t + 1));
  float decoded[576];
  view.quant.decode(view.key_tile(TableEntry{2}, 0), 3, decoded);
  int wrong = 0;
  for (int d = 0; d < 576; ++d) wrong += decoded[d] != value(d, 4.0f);
  CHECK(wrong == 0);

  // One query of zeros weighs all tokens the same: the mean factor is 3.
  const std::int32_t entries[] = {2, 0}, indptr[] = {0, 2}, length[] = {5};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, indptr};
  batch.lengths = length;
  Random random(1);
  Attention a = Attention::make<Latent576>(random, 1, 2);
  check_attend(view, batch, a, 2);
  for (float& q : a.queries) q = 0.0f;
  check_attend(view, batch, a, 2);
  for (int d = 0; d < 512; ++d)
    CHECK(a.out[static_cast<std::size_t>(d)] == Approx(value(d, 3.0f)).margin(1e-5));

  // append() writes the same bytes as encode() by section, and nothing else.
  std::vector<std::byte> before(memory, memory + bytes * page * pages);
  const std::int64_t slots[] = {1};
  batch.slots = slots;
  const std::vector<float> key = random.gauss(576);
  AppendArgs args;
  args.keys = {key.data(), 576, 576};
  REQUIRE(cpu::append(view, batch, args, cpu::serial));
  for (int d = 0; d < 64; ++d) {
    const bf16 rope(key[static_cast<std::size_t>(512 + d)]);
    std::memcpy(before.data() + bytes + 528 + 2 * d, &rope, 2);
  }
  for (int block = 0; block < 4; ++block) {
    float amax = 0.0f;
    for (int d = block * 128; d < block * 128 + 128; ++d)
      amax = std::max(amax, std::fabs(key[static_cast<std::size_t>(d)]));
    const float scale = std::exp2(std::ceil(std::log2(amax / 448.0f)));
    std::memcpy(before.data() + bytes + 512 + 4 * block, &scale, 4);
    for (int d = block * 128; d < block * 128 + 128; ++d) {
      const fp8_e4m3 code(key[static_cast<std::size_t>(d)] / scale);
      std::memcpy(before.data() + bytes + d, &code, 1);
    }
  }
  CHECK(std::memcmp(before.data(), memory, before.size()) == 0);
}

TEST_CASE("an engine's sections that would tear elements apart are refused") {
  std::vector<float> storage(656 * 8 / 4 + 4);
  auto* memory = reinterpret_cast<std::byte*>(storage.data());
  const auto refused = [&](int offset, std::int64_t stride) {
    PagedView<Latent576, LatentSections<16>> view{};
    view.page_tokens = 4;
    view.formats[0].keys = {memory + offset, 4 * stride, 0, stride};
    view.formats[0].key_params = {memory + offset + 512, 4 * stride, 0, stride};
    view.formats[0].pages = 1;
    return !validate(view);
  };
  CHECK(!refused(0, 656));
  CHECK(refused(1, 656));  // neither bf16 nor float
  CHECK(refused(2, 656));  // no float
  CHECK(refused(0, 657));
  CHECK(refused(0, 658));
}

TEST_CASE("sections keep their tokens apart, or do not fit") {
  const auto check = [](auto layout, auto quant) {
    using Layout = decltype(layout);
    using Quant = decltype(quant);
    PagedCache<Layout, Quant> cache({.shape = {1, 1, dynamic}, .pages = 2});
    poison(cache);
    Random random(1);
    Step step = cache.begin_step();
    REQUIRE(step.extend(*step.create(), 4));
    const Batch batch = step.commit();
    const auto tokens = random_tokens<Layout>(random, 4, 1);
    const auto view = cache.view(LayerId{0});
    REQUIRE(cpu::append(view, batch, tokens.args(1), cpu::serial));
    int wrong = 0;
    for (int slot = 0; slot < 4; ++slot) {
      float got[Layout::key_dim];
      view.quant.decode(view.key_tile(TableEntry{0}, 0), slot, got);
      for (int d = 0; d < Layout::key_dim; ++d)
        wrong +=
            !(std::fabs(got[d] - tokens.keys[static_cast<std::size_t>(slot * Layout::key_dim + d)]) < 0.1f);
    }
    CHECK(wrong == 0);
  };
  check(Gqa<8, 4>{}, Sections<Section<Int8, 4>, Section<Identity<float>, 4>>{});
  check(Gqa<8, 4>{}, Sections<Section<Int8, 6>, Section<Identity<bf16>, 2>>{});
  // Elements that would not begin where they must make a cache of other dims impossible.
  CHECK(!fits<Sections<Section<Int8, 6>, Section<Identity<float>, 2>>>(8));
  CHECK(!fits<Sections<Section<Int8, 5>, Section<Identity<bf16>, 3>>>(8));
  CHECK(!fits<Sections<Section<Identity<float>, 2>, Section<Int8, 6>>>(8));
}

TEST_CASE("quantizers of blocks work with every head width") {
  const auto check = [](auto layout, auto quant) {
    using Layout = decltype(layout);
    PagedCache<Layout, decltype(quant)> cache({.shape = {1, 1, dynamic}, .pages = 2, .exact_pages = 2});
    poison(cache);
    Random random(1);
    Step step = cache.begin_step();
    REQUIRE(step.extend(*step.create(), Layout::page_tokens + 1));
    const Batch batch = step.commit();
    CAPTURE(Layout::key_dim);
    const auto tokens = random_tokens<Layout>(random, batch.tokens(), 1);
    const auto ok = cpu::append(cache.view(LayerId{0}), batch, tokens.args(1), cpu::serial);
    CHECK((ok ? "" : ok.error().message()) == "");
    if (!ok) return;
    Attention a = Attention::make<Layout>(random, batch.tokens(), 1);
    check_attend(cache.view(LayerId{0}), batch, a, 1);
  };
  check(Gqa<64, 32>{}, Int4Channels<32>{});
  check(Gqa<8, 32>{}, Int4Channels<32>{});
  check(Gqa<40, 32>{}, Int4Channels<32>{});
  check(Gqa<72, 32>{}, Int4Channels<32>{});
  check(Gqa<80, 64>{}, Int4Channels<64>{});
  check(Gqa<120, 32>{}, Int4Channels<32>{});
  check(Gqa<24, 32>{}, Centered<Int8>{});
  check(Gqa<80, 32>{}, Centered<Int8>{});
  check(Gqa<120, 32>{}, Centered<Int8>{});
}

// Recodes that an engine made.

namespace {

/// A view of a cache's pages and a batch by hand: one row of eight tokens for two coded pages of four.
struct Engine {
  using Layout = Gqa<8, 4>;
  using Quant = Mixed<Int4Channels<4>, Int4<0>>;
  PagedCache<Layout, Quant> cache{{.shape = {1, 2, dynamic}, .pages = 4, .exact_pages = 3, .low_pages = 2}};
  Random random{1};
  NewTokens<Layout> tokens = random_tokens<Layout>(random, 8, 2);
  std::vector<std::int32_t> indptr{0, 8};
  std::vector<std::int64_t> slots;
  std::vector<PageRecode> recodes;
  BatchView batch;

  static TableEntry coded(int page) { return TableEntry::make(0, PageId{page}); }
  static TableEntry exact(int page) { return TableEntry::make(1, PageId{page}); }
  static TableEntry low(int page) { return TableEntry::make(2, PageId{page}); }

  Engine() {
    poison(cache);
    for (std::int64_t slot = 4; slot < 12; ++slot) slots.push_back(slot);  // pages 1 and 2
    recodes = {{{}, coded(1), 0, 0, 4}, {{}, coded(2), 0, 4, 4}};
  }
  Result<> append() {
    batch.rows = 1;
    batch.query_indptr = indptr.data();
    batch.slots = slots.data();
    batch.recodes = recodes.data();
    batch.recode_count = static_cast<std::int32_t>(recodes.size());
    return cpu::append(cache.view(LayerId{0}), batch, tokens.args(2), cpu::serial);
  }
  /// What append() names; nothing has been written.
  std::string refused() {
    const auto before = all_bytes(cache);
    const auto result = append();
    CHECK((all_bytes(cache) == before));
    CHECK(!result);
    return result ? "accepted" : result.error().subject;
  }
};

}  // namespace

TEST_CASE_METHOD(Engine,
                 "an engine's recodes write what encode() gives, and a page that is only opened or moved") {
  REQUIRE(append());
  const auto sealed = all_bytes(cache);
  // Page 2 from an exact page and one new token gives the bytes of page 2 from four tokens.
  slots.assign({PhysSlot::make(exact(0), 0, 4).raw, PhysSlot::make(exact(0), 1, 4).raw,
                PhysSlot::make(exact(0), 2, 4).raw});
  indptr = {0, 3};
  recodes.clear();
  NewTokens<Layout> all = tokens;
  const auto shift = [&](int n) {
    tokens.keys.assign(all.keys.begin() + n * 16, all.keys.end());
    tokens.values.assign(all.values.begin() + n * 16, all.values.end());
  };
  shift(4);
  REQUIRE(append());
  slots.assign({PhysSlot::make(coded(3), 3, 4).raw});
  indptr = {0, 1};
  recodes = {{exact(0), coded(3), 3, 0, 1}};
  shift(7);
  REQUIRE(append());
  CHECK((bytes_of(cache, coded(3)) == sealed[2]));

  // Without a token: opened and moved.
  indptr = {0, 0};
  recodes = {{coded(3), exact(1), 2, 0, 0}, {coded(1), low(1), 4, 0, 0}};
  REQUIRE(append());
  const auto view = cache.view(LayerId{0});
  float from[8], to[8];
  int wrong = 0;
  for (int head = 0; head < 2; ++head)
    for (int slot = 0; slot < 2; ++slot) {
      format_quant<0>(view.quant).decode(view.value_tile(coded(3), head), slot, from);
      format_quant<1>(view.quant).decode(view.value_tile(exact(1), head), slot, to);
      for (int d = 0; d < 8; ++d) wrong += to[d] != static_cast<float>(fp16(from[d]));
    }
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(Engine, "an engine's recodes that are wrong are refused and nothing is written") {
  SECTION("no recodes at all") {
    recodes.clear();
    CHECK(refused() == "batch.recodes (pages coded as a whole come through them)");
  }
  SECTION("one too few") {
    recodes.pop_back();
    CHECK(refused() == "batch.recodes (pages coded as a whole come through them)");
  }
  SECTION("a count without recodes, or below zero") {
    batch.rows = 1;
    batch.query_indptr = indptr.data();
    batch.slots = slots.data();
    for (const int count : {1, -1}) {
      batch.recode_count = count;
      const auto ok = cpu::append(cache.view(LayerId{0}), batch, tokens.args(2), cpu::serial);
      REQUIRE(!ok);
      CHECK(std::string(ok.error().subject) == "batch.recodes");
    }
  }
  SECTION("one page twice, another one not at all") {
    recodes[1] = recodes[0];
    CHECK(refused() != "accepted");
  }
  SECTION("one page twice, all slots covered") {
    recodes.push_back(recodes[0]);
    CHECK(refused() != "accepted");
  }
  SECTION("an exact page's tokens instead of a coded page's") {
    for (int t = 0; t < 4; ++t) slots[static_cast<std::size_t>(t)] = PhysSlot::make(exact(0), t, 4).raw;
    recodes = {{{}, exact(0), 0, 0, 4}};
    CHECK(refused() != "accepted");
  }
  SECTION("a coded page that is not full") {
    recodes[1].new_tokens = 3;
    CHECK(refused() == "batch.recodes.kept");
  }
  SECTION("kept tokens without a page") {
    recodes[1].kept = 1, recodes[1].first_token = 5, recodes[1].new_tokens = 3;
    CHECK(refused() == "batch.recodes.from (page)");
  }
  SECTION("kept tokens of a page that is not there") {
    recodes[1] = {exact(3), coded(2), 1, 5, 3};
    CHECK(refused() == "batch.recodes.from (page)");
    recodes[1].from = TableEntry::make(3, PageId{0});
    CHECK(refused() == "batch.recodes.from (format)");
  }
  SECTION("a target that is not there") {
    recodes[1].to = coded(4);
    CHECK(refused() == "batch.recodes.to (page)");
    recodes[1].to = TableEntry{};  // skipped, but its tokens have slots
    CHECK(refused() == "batch.recodes (pages coded as a whole come through them)");
    recodes[1].to = TableEntry::make(3, PageId{0});
    CHECK(refused() == "batch.recodes.to (format)");
  }
  SECTION("numbers below zero or beyond the page") {
    recodes[1] = {exact(0), coded(2), -1, 4, 5};
    CHECK(refused() == "batch.recodes.kept");
    recodes[1] = {exact(0), coded(2), 5, 4, -1};
    CHECK(refused() == "batch.recodes.kept");
    recodes[1] = {exact(0), coded(2), 4, 4, 1};
    CHECK(refused() == "batch.recodes.kept");
    recodes[1] = {coded(0), exact(0), 5, 0, 0};
    CHECK(refused() == "batch.recodes.kept");
    recodes[1] = {exact(0), coded(2), INT32_MAX, 4, INT32_MAX};
    CHECK(refused() == "batch.recodes.kept");
  }
  SECTION("tokens that the batch does not have") {
    recodes[1].first_token = 5;
    CHECK(refused() == "batch.recodes.first_token");
    recodes[1].first_token = -1;
    CHECK(refused() == "batch.recodes.first_token");
    recodes[1].first_token = INT32_MAX;
    CHECK(refused() == "batch.recodes.first_token");
  }
  SECTION("tokens whose slots are elsewhere") {
    recodes[1].first_token = 3;  // a token of the recode before
    CHECK(refused() == "batch.recodes.first_token");
    recodes[1].first_token = 4;
    std::swap(slots[5], slots[6]);
    CHECK(refused() == "batch.recodes (other tokens have the page's slots)");
  }
  SECTION("a token of a coded page that is to be skipped") {
    slots[6] = -1;
    CHECK(refused() == "batch.recodes (other tokens have the page's slots)");
  }
  SECTION("one token more than comes through recodes") {
    indptr = {0, 9};
    slots.push_back(12);
    tokens = random_tokens<Layout>(random, 9, 2);
    CHECK(refused() == "batch.recodes (pages coded as a whole come through them)");
  }
}

TEST_CASE("an engine's view with pages that are not whole blocks is refused") {
  PagedCache<Gqa<8, dynamic>, Int4Channels<4>> cache({.shape = {1, 1, 8}, .pages = 2, .exact_pages = 2});
  auto view = cache.view(LayerId{0});
  view.page_tokens = 6;
  REQUIRE(!validate(view));
  CHECK(validate(view).error().message() ==
        "invalid argument: view.page_tokens (the quantizer codes blocks) (is 6, bound 4)");
  CHECK(!cpu::append(view, BatchView{}, {}, cpu::serial));
}
