// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels that move pages and tokens, and look at keys.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvfolia/cuda/compact.hpp"
#include "kvfolia/cuda/key_stats.hpp"
#include "kvfolia/cuda/move_pages.hpp"
#include "simt/append_scenario.hpp"

using namespace kvfolia_tests;

namespace {

/// Two formats of pages of random bytes, aligned as stores are.
struct Slices {
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  static constexpr int layers = 3;
  std::vector<Line> memory[2];
  StoreView store;

  Slices() {
    Random random(8);
    store.layers = layers;
    const std::int64_t bytes[] = {16 * 1025, 64};  // of more than one block, and of less
    const std::int32_t pages[] = {6, 9};
    for (int f = 0; f < 2; ++f) {
      memory[f].resize(static_cast<std::size_t>(bytes[f] * pages[f] * layers + 63) / 64);
      for (Line& line : memory[f])
        for (auto& b : line.bytes) b = static_cast<std::uint8_t>(random.next());
      // One layer-major, one page-major.
      store.formats[f] = {reinterpret_cast<std::byte*>(memory[f].data()),
                          f == 0 ? bytes[f] * pages[f] : bytes[f], f == 0 ? bytes[f] : bytes[f] * layers,
                          bytes[f], pages[f]};
    }
  }
  std::vector<std::byte> page(int format, int number) const {
    std::vector<std::byte> bytes;
    for (int layer = 0; layer < layers; ++layer) {
      const std::byte* slice = store.formats[format].slice(layer, PageId{number});
      bytes.insert(bytes.end(), slice, slice + store.formats[format].slice_bytes);
    }
    return bytes;
  }
  template <cuda::PageMove Move>
  simt::Counts run(cuda::detail::MoveArgs args, std::size_t buffer_bytes = 0) {
    simt::GlobalMemory global;
    for (const auto& m : memory) global.add(m.data(), m.size() * 64, "store", true);
    const auto count = static_cast<std::size_t>(args.count);
    if (args.copies) global.add(args.copies, count * sizeof(PageCopy), "copies", false);
    if (args.pages) global.add(args.pages, count * 4, "page numbers", false);
    if (args.buffer) global.add(args.buffer, buffer_bytes, "buffer", true);
    args.store = store;
    args.chunks = cuda::detail::move_chunks(args.copies ? cuda::detail::largest_slice(store)
                                                        : store.formats[args.format].slice_bytes);
    REQUIRE(cuda::detail::check_move(args, Move));
    return simt::launch({.grid = {args.count * args.chunks, layers, 1},
                         .threads = cuda::detail::move_threads,
                         .counts_requests = true},
                        global, 4, [&](simt::HostContext& ctx) { cuda::move_pages<Move>(ctx, args); });
  }
};

}  // namespace

TEST_CASE("pages are copied whole, all layers and formats") {
  Slices slices;
  const std::vector<PageCopy> copies = {
      {0, PageId{1}, PageId{4}}, {1, PageId{8}, PageId{0}}, {0, PageId{2}, PageId{0}}};
  std::vector<std::vector<std::byte>> before, sources;
  for (const PageCopy& c : copies) sources.push_back(slices.page(c.format, c.from.value));
  const auto bystander = slices.page(0, 5), other = slices.page(1, 1);
  const simt::Counts counts = slices.run<cuda::PageMove::copy>({.copies = copies.data(), .count = 3});
  for (std::size_t i = 0; i < copies.size(); ++i) {
    CHECK(slices.page(copies[i].format, copies[i].to.value) == sources[i]);
    CHECK(slices.page(copies[i].format, copies[i].from.value) == sources[i]);
  }
  CHECK(slices.page(0, 5) == bystander);
  CHECK(slices.page(1, 1) == other);
  const double moved = 3.0 * (2 * 16 * 1025 + 64);
  CHECK(static_cast<double>(counts.writes.sectors) * 32 <= 1.1 * moved);
  CHECK(static_cast<double>(counts.reads.sectors) * 32 <= 1.1 * moved);
}

TEST_CASE("a copied page carries its scales: attention over the copy is the same") {
  using Layout = Gqa<64, 16>;
  PagedCache<Layout, KeyValue<Int4Channels<16>, Int4<32>>> cache(
      {.shape = {2, 2, dynamic}, .pages = 8, .exact_pages = 2});
  poison(cache);
  Random random(30);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 32));
  const Batch batch = run_step(cache, std::move(step), random);
  StoreView store;
  store.layers = 2;
  const std::int64_t slice = cache.store().page_bytes(0) / 2;
  store.formats[0] = {cache.store().data(0, 0), cache.store().data(0, 1) - cache.store().data(0, 0),
                      cache.store().page_stride(0), slice, 8};
  const auto pages = cache.sequence(id)->pages;
  const PageCopy copies[] = {{0, pages[0].entry.page(), PageId{7}}, {0, pages[1].entry.page(), PageId{6}}};
  const cuda::detail::MoveArgs args{.store = store,
                                    .copies = copies,
                                    .pages = nullptr,
                                    .buffer = nullptr,
                                    .count = 2,
                                    .format = 0,
                                    .chunks = cuda::detail::move_chunks(slice)};
  simt::GlobalMemory global;
  simt::add_pages(global, cache);
  global.add(copies, sizeof copies, "copies", false);
  simt::launch({.grid = {2 * args.chunks, 2, 1}, .threads = cuda::detail::move_threads}, global, 2,
               [&](simt::HostContext& ctx) { cuda::move_pages<cuda::PageMove::copy>(ctx, args); });
  const std::int32_t table[] = {7, 6};
  for (const int layer : {0, 1}) {
    Attention a = Attention::make<Layout>(random, 32, 4);
    BatchView view = batch;
    const auto original = ref::attend(cache.view(LayerId{layer}), view, a.args, 4);
    view.table.entries = table;
    const auto copied = ref::attend(cache.view(LayerId{layer}), view, a.args, 4);
    REQUIRE((original && copied));
    CHECK(original->out == copied->out);
  }
}

TEST_CASE("pages are gathered into a buffer and scattered from it") {
  Slices slices;
  for (const int format : {0, 1}) {
    const std::int32_t pages[] = {3, -1, 5, 0};
    const auto page_bytes =
        static_cast<std::size_t>(slices.store.formats[format].slice_bytes * Slices::layers);
    std::vector<Slices::Line> buffer((4 * page_bytes + 63) / 64, Slices::Line{});
    auto* bytes = reinterpret_cast<std::byte*>(buffer.data());
    const simt::Counts gathered = slices.run<cuda::PageMove::gather>(
        {.pages = pages, .buffer = bytes, .count = 4, .format = format}, 4 * page_bytes);
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{3}}) {
      const auto page = slices.page(format, pages[i]);
      CHECK(std::memcmp(bytes + i * page_bytes, page.data(), page_bytes) == 0);
    }
    CHECK(std::all_of(bytes + page_bytes, bytes + 2 * page_bytes,
                      [](std::byte b) { return b == std::byte{0}; }));
    const std::int32_t to[] = {1, -1, 4, 2};
    const auto untouched = slices.page(format, 3);
    const simt::Counts scattered = slices.run<cuda::PageMove::scatter>(
        {.pages = to, .buffer = bytes, .count = 4, .format = format}, 4 * page_bytes);
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{3}}) {
      const auto page = slices.page(format, to[i]);
      CHECK(std::memcmp(bytes + i * page_bytes, page.data(), page_bytes) == 0);
    }
    CHECK(slices.page(format, 3) == untouched);
    for (const simt::Counts& counts : {gathered, scattered}) {
      const double moved = 3.0 * static_cast<double>(page_bytes);
      CHECK(static_cast<double>(counts.writes.sectors) * 32 <= 1.1 * moved);
      if (format == 0) CHECK(static_cast<double>(counts.reads.sectors) * 32 <= 1.1 * moved);
    }
  }
}

TEST_CASE("moves say what they cannot be given") {
  Slices slices;
  const auto refuses = [&](cuda::PageMove move, cuda::detail::MoveArgs args, const std::string& subject) {
    args.chunks = 1;
    const auto ok = cuda::detail::check_move(args, move);
    REQUIRE(!ok);
    CHECK(std::string(ok.error().subject).find(subject) != std::string::npos);
  };
  const std::int32_t page = 0;
  refuses(cuda::PageMove::copy, {.store = slices.store, .count = -1}, "count");
  refuses(cuda::PageMove::copy, {.store = slices.store, .count = 1}, "copies");
  refuses(cuda::PageMove::gather, {.store = slices.store, .count = 1, .format = 0}, "pages");
  refuses(cuda::PageMove::gather, {.store = slices.store, .pages = &page, .count = 1, .format = 3}, "format");
  refuses(cuda::PageMove::scatter, {.store = slices.store, .pages = &page, .count = 1}, "buffer");
  auto shifted = slices.store;
  shifted.formats[0].base += 8;
  refuses(cuda::PageMove::copy, {.store = shifted, .count = 1}, "store.formats (alignment)");
}

namespace {

/// What a mask keeps, moved by the kernel, against the same by hand.
template <class Layout, class Quant>
void check_compact(int page_tokens, bool table_a_head) {
  CAPTURE(page_tokens, table_a_head);
  constexpr int heads = 2;
  const std::vector<int> lengths = {70, 0, 33, 5};
  Random random(17);
  CacheConfig config{.shape = {1, heads, page_tokens}, .pages = 400};
  PagedCache<Layout, Quant> cache(config);
  poison(cache);
  std::vector<SeqId> sequences;
  Step step = cache.begin_step();
  const int tables = table_a_head ? heads : 1;
  // A table a head: the first head's pages hold both heads' tokens, of which one is used.
  for (const int length : lengths)
    for (int table = 0; table < tables; ++table) {
      sequences.push_back(*step.create());
      REQUIRE(step.extend(sequences.back(), length));
    }
  run_step(cache, std::move(step), random);
  const auto view = cache.view(LayerId{0});

  // Padded tables, [table][row][entry].
  const int rows = static_cast<int>(lengths.size()), row_entries = (70 + page_tokens - 1) / page_tokens;
  const auto slots = static_cast<std::size_t>(row_entries * page_tokens);
  std::vector<std::int32_t> entries(static_cast<std::size_t>(tables * rows * row_entries), -1);
  for (int row = 0; row < rows; ++row)
    for (int table = 0; table < tables; ++table) {
      const auto pages = cache.sequence(sequences[static_cast<std::size_t>(row * tables + table)])->pages;
      for (std::size_t i = 0; i < pages.size(); ++i)
        entries[static_cast<std::size_t>((table * rows + row) * row_entries) + i] = pages[i].entry.raw;
    }
  BatchView batch;
  batch.rows = rows;
  batch.table = {entries.data(), nullptr, row_entries, table_a_head ? rows * row_entries : 0};
  batch.lengths = lengths.data();
  const std::size_t words = (slots + 31) / 32;
  std::vector<std::uint32_t> keep(static_cast<std::size_t>(rows * tables) * words);
  for (auto& word : keep) word = static_cast<std::uint32_t>(random.next());
  keep[words * static_cast<std::size_t>(tables)] = ~0u;  // of the row without tokens
  std::vector<std::int32_t> positions(entries.size() * static_cast<std::size_t>(page_tokens), -7);
  std::vector<std::int32_t> kept(static_cast<std::size_t>(rows * tables), -7);
  cuda::CompactArgs args{keep.data(), tables * static_cast<std::int64_t>(words),
                         table_a_head ? static_cast<std::int64_t>(words) : 0, positions.data(), kept.data()};

  const auto values_of = [&](int row, int head, int slot) {
    const int table = table_a_head ? head : 0;
    const TableEntry entry{
        entries[static_cast<std::size_t>((table * rows + row) * row_entries + slot / page_tokens)]};
    std::vector<float> values(Layout::key_dim + Layout::value_dim);
    visit_format(view, entry, [&](const auto& quant) {
      key_side(quant).decode(view.key_tile(entry, head), slot % page_tokens, values.data());
      if constexpr (!Layout::shares_key_value)
        value_side(quant).decode(view.value_tile(entry, head), slot % page_tokens,
                                 values.data() + Layout::key_dim);
    });
    return values;
  };
  struct Expected {
    std::vector<std::vector<float>> tokens;
    std::vector<int> positions;
  };
  std::vector<Expected> expected;
  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < heads; ++head) {
      Expected e;
      const std::uint32_t* mask =
          keep.data() + static_cast<std::size_t>(row * tables + (table_a_head ? head : 0)) * words;
      for (int slot = 0; slot < lengths[static_cast<std::size_t>(row)]; ++slot)
        if (mask[slot / 32] >> slot % 32 & 1u) {
          e.tokens.push_back(values_of(row, head, slot));
          e.positions.push_back(slot);
        }
      expected.push_back(e);
    }

  REQUIRE(cuda::detail::check_compact(view, batch, args));
  const cuda::detail::CompactionArgs<Layout, Quant> all{view, batch, args};
  simt::GlobalMemory global;
  add_pages(global, cache);
  global.add(entries.data(), entries.size() * 4, "entries", false);
  global.add(lengths.data(), lengths.size() * 4, "lengths", false);
  global.add(keep.data(), keep.size() * 4, "keep", false);
  global.add(positions.data(), positions.size() * 4, "positions", true);
  global.add(kept.data(), kept.size() * 4, "kept", true);
  const simt::Counts counts =
      simt::launch({.grid = {rows, heads, 1},
                    .threads = cuda::detail::write_threads,
                    .shared_bytes = cuda::detail::compact_shared_bytes,
                    .counts_requests = true},
                   global, 23, [&](simt::HostContext& ctx) { cuda::compact(ctx, all); });
  CHECK(counts.bank_conflicts == 0);
  if constexpr (std::is_same_v<Quant, Identity<fp16>>) {
    std::size_t moved = 0;
    for (const Expected& e : expected) moved += e.tokens.size() * (Layout::key_dim + Layout::value_dim) * 2;
    CHECK(static_cast<double>(counts.writes.sectors) * 32 <= 1.1 * static_cast<double>(moved));
    CHECK(static_cast<double>(counts.reads.sectors) * 32 <= 1.1 * static_cast<double>(moved));
  }

  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < heads; ++head) {
      const Expected& e = expected[static_cast<std::size_t>(row * heads + head)];
      const int table = table_a_head ? head : 0;
      CHECK(kept[static_cast<std::size_t>(row * tables + table)] == static_cast<int>(e.tokens.size()));
      int wrong = 0;
      for (std::size_t i = 0; i < e.tokens.size(); ++i) {
        wrong += values_of(row, head, static_cast<int>(i)) != e.tokens[i];
        wrong += positions[static_cast<std::size_t>((table * rows + row) * row_entries * page_tokens) + i] !=
                 e.positions[i];
      }
      CHECK(wrong == 0);
    }
}

}  // namespace

TEST_CASE("tokens that a mask keeps move to the front of their tables") {
  check_compact<Gqa<64, dynamic>, Int8>(16, false);
  check_compact<Gqa<64, dynamic>, Int8>(3, true);
  check_compact<Gqa<128, dynamic>, Identity<fp16>>(32, true);
  check_compact<Gqa<96, dynamic>, KeyValue<Int8, Int4<32>>>(8, false);
  check_compact<Mla<128, 64, dynamic>, Sections<Section<Fp8Blocks<>, 128>, Section<Identity<bf16>, 64, 16>>>(
      4, false);
  static_assert(!cuda::compact_supported<Gqa<64>, Int4Channels<32>>());
}

namespace {

template <class Quant>
void check_stats(int exact_sink_pages = 0) {
  using Layout = Gqa<64, 16>;
  constexpr int heads = 2, dims = 64;
  PagedCache<Layout, Quant> cache({.shape = {1, heads, dynamic},
                                   .pages = 8,
                                   .exact_pages = exact_format<Quant> == coded_format ? 0 : 4,
                                   .exact_sink_pages = exact_sink_pages});
  poison(cache);
  Random random(5);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 53));
  run_step(cache, std::move(step), random);
  const auto view = cache.view(LayerId{0});
  std::vector<std::int32_t> entries, tokens;
  const SequenceInfo info = *cache.sequence(id);
  for (const TablePage& page : info.pages) {
    entries.push_back(page.entry.raw);
    tokens.push_back(std::min(16, 53 - page.begin.value));
  }
  entries.push_back(-1);
  tokens.push_back(16);
  tokens[1] = 0;  // as of a page that is used again
  const auto planes = static_cast<std::size_t>(12 * heads * dims);
  std::vector<float> min(planes, -1.0f), max(planes, -1.0f), mean(planes, -1.0f);
  const cuda::KeyStatsArgs args{entries.data(), tokens.data(), static_cast<std::int32_t>(entries.size()),
                                min.data(),     max.data(),    mean.data(),
                                {0, 8, 0}};
  REQUIRE(cuda::detail::check_key_stats(view, args));
  simt::GlobalMemory global;
  add_pages(global, cache, false);
  for (auto* out : {&min, &max, &mean}) global.add(out->data(), out->size() * 4, "statistics", true);
  for (auto* in : {&entries, &tokens}) global.add(in->data(), in->size() * 4, "pages", false);
  simt::launch({.grid = {args.count, heads, 1}, .threads = cuda::detail::write_threads}, global, 3,
               [&](simt::HostContext& ctx) { cuda::key_stats(ctx, view, args); });
  int written = 0;
  for (std::size_t i = 0; i + 1 < entries.size(); ++i)
    for (int head = 0; head < heads; ++head) {
      const TableEntry entry{entries[i]};
      const auto at =
          static_cast<std::size_t>(((entry.format() == 0 ? 0 : 8) + entry.page().value) * heads + head) *
          dims;
      std::vector<std::vector<float>> keys;
      for (int slot = 0; slot < tokens[i]; ++slot) {
        keys.emplace_back(dims);
        visit_format(view, entry, [&](const auto& quant) {
          key_side(quant).decode(view.key_tile(entry, head), slot, keys.back().data());
        });
      }
      for (std::size_t d = 0; d < dims; ++d, ++written) {
        double low = std::numeric_limits<double>::infinity(), high = -low, sum = 0.0;
        for (const auto& key : keys) {
          low = std::min(low, double{key[d]});
          high = std::max(high, double{key[d]});
          sum += key[d];
        }
        CHECK(min[at + d] == static_cast<float>(low));
        CHECK(max[at + d] == static_cast<float>(high));
        CHECK(std::fabs(mean[at + d] - (keys.empty() ? 0.0 : sum / static_cast<double>(keys.size()))) < 1e-6);
      }
    }
  // Nothing else.
  CHECK(std::count_if(min.begin(), min.end(), [](float x) { return x != -1.0f; }) == written);
}

}  // namespace

TEST_CASE("pages' smallest, largest and mean keys") {
  check_stats<Identity<fp16>>();
  check_stats<Int8>(1);
  check_stats<KeyValue<Int4Channels<16>, Int4<32>>>();
  check_stats<Rotated<Centered<Int4<32>, 16>>>();
  check_stats<Compact4Channels<16>>();
  check_stats<Q4_0>();
}
