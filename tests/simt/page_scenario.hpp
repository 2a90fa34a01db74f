// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Operations on pages, by whoever runs their kernels, against the same done by hand.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kvfolia/cuda/compact.hpp"
#include "kvfolia/cuda/key_stats.hpp"
#include "kvfolia/cuda/move_pages.hpp"
#include "simt/append_scenario.hpp"
#include "support/arrays.hpp"

namespace kvfolia_tests::simt {

/// Who runs the kernels: the host's context.
struct HostRunner {
  static constexpr bool counts = true;

  template <cuda::PageMove Move>
  static Counts move(cuda::detail::MoveArgs args, const Arrays& arrays) {
    args.chunks = cuda::detail::move_chunks(args.copies ? cuda::detail::largest_slice(args.store)
                                                        : args.store.formats[args.format].slice_bytes);
    REQUIRE(cuda::detail::check_move(args, Move));
    return launch(
        {.grid = {args.count * args.chunks, args.store.layers, 1}, .threads = cuda::detail::move_threads},
        arrays, [&](HostContext& ctx) { cuda::move_pages<Move>(ctx, args); });
  }
  template <class Layout, class Quant>
  static Counts compact(const PagedView<Layout, Quant>& view, const BatchView& batch,
                        const cuda::CompactArgs& args, const Arrays& arrays) {
    REQUIRE(cuda::detail::check_compact(view, batch, args));
    const cuda::detail::CompactionArgs<Layout, Quant> all{view, batch, args};
    return launch({.grid = {batch.rows, view.kv_heads, 1},
                   .threads = cuda::detail::write_threads,
                   .shared_bytes = cuda::detail::compact_shared_bytes},
                  arrays, [&](HostContext& ctx) { cuda::compact(ctx, all); });
  }
  template <class Layout, class Quant>
  static Counts key_stats(const PagedView<Layout, Quant>& view, const cuda::KeyStatsArgs& args,
                          const Arrays& arrays) {
    REQUIRE(cuda::detail::check_key_stats(view, args));
    return launch({.grid = {args.count, view.kv_heads, 1}, .threads = cuda::detail::write_threads}, arrays,
                  [&](HostContext& ctx) { cuda::key_stats(ctx, view, args); });
  }

 private:
  template <class Body>
  static Counts launch(LaunchConfig config, const Arrays& arrays, const Body& body) {
    GlobalMemory global;
    add_arrays(global, arrays);
    config.counts_requests = true;
    return simt::launch(config, global, 23, body);
  }
};

/// Two formats of pages of random bytes.
struct Slices {
  static constexpr int layers = 3;
  AlignedVector<std::byte> memory[2];
  StoreView store;

  Slices() {
    Random random(8);
    store.layers = layers;
    const std::int64_t bytes[] = {16 * 1025, 64};  // of more than one block, and of less
    const std::int32_t pages[] = {6, 9};
    for (int f = 0; f < 2; ++f) {
      memory[f].resize(static_cast<std::size_t>(bytes[f] * pages[f] * layers));
      for (std::byte& b : memory[f]) b = static_cast<std::byte>(random.next());
      // One layer-major, one page-major.
      store.formats[f] = {memory[f].data(), f == 0 ? bytes[f] * pages[f] : bytes[f],
                          f == 0 ? bytes[f] : bytes[f] * layers, bytes[f], pages[f]};
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
  /// Runs a move, whose other arrays are given; the store's are added.
  template <cuda::PageMove Move, class Runner>
  Counts run(cuda::detail::MoveArgs args, Arrays arrays) {
    for (auto& m : memory) arrays.push_back(written_array(m, "store"));
    args.store = store;
    return Runner::template move<Move>(args, arrays);
  }
};

template <class Runner = HostRunner>
void check_copies() {
  Slices slices;
  const std::vector<PageCopy> copies = {
      {0, PageId{1}, PageId{4}}, {1, PageId{8}, PageId{0}}, {0, PageId{2}, PageId{0}}};
  std::vector<std::vector<std::byte>> sources;
  for (const PageCopy& c : copies) sources.push_back(slices.page(c.format, c.from.value));
  const auto bystander = slices.page(0, 5), other = slices.page(1, 1);
  const Counts counts = slices.run<cuda::PageMove::copy, Runner>({.copies = copies.data(), .count = 3},
                                                                 {read_array(copies, "copies")});
  for (std::size_t i = 0; i < copies.size(); ++i) {
    CHECK(slices.page(copies[i].format, copies[i].to.value) == sources[i]);
    CHECK(slices.page(copies[i].format, copies[i].from.value) == sources[i]);
  }
  CHECK(slices.page(0, 5) == bystander);
  CHECK(slices.page(1, 1) == other);
  const double moved = 3.0 * (2 * 16 * 1025 + 64);
  if (Runner::counts) {
    check_sectors(counts.reads.sectors, moved);
    check_sectors(counts.writes.sectors, moved);
  }
}

template <class Runner = HostRunner>
void check_buffers() {
  Slices slices;
  for (const int format : {0, 1}) {
    const std::vector<std::int32_t> pages = {3, -1, 5, 0}, to = {1, -1, 4, 2};
    const auto page_bytes =
        static_cast<std::size_t>(slices.store.formats[format].slice_bytes * Slices::layers);
    AlignedVector<std::byte> buffer(4 * page_bytes);
    std::byte* bytes = buffer.data();
    const Counts gathered = slices.run<cuda::PageMove::gather, Runner>(
        {.pages = pages.data(), .buffer = bytes, .count = 4, .format = format},
        {read_array(pages, "page numbers"), written_array(buffer, "buffer")});
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{3}}) {
      const auto page = slices.page(format, pages[i]);
      CHECK(std::memcmp(bytes + i * page_bytes, page.data(), page_bytes) == 0);
    }
    CHECK(std::all_of(bytes + page_bytes, bytes + 2 * page_bytes,
                      [](std::byte b) { return b == std::byte{0}; }));
    const auto untouched = slices.page(format, 3);
    const Counts scattered = slices.run<cuda::PageMove::scatter, Runner>(
        {.pages = to.data(), .buffer = bytes, .count = 4, .format = format},
        {read_array(to, "page numbers"), written_array(buffer, "buffer")});
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}, std::size_t{3}}) {
      const auto page = slices.page(format, to[i]);
      CHECK(std::memcmp(bytes + i * page_bytes, page.data(), page_bytes) == 0);
    }
    CHECK(slices.page(format, 3) == untouched);
    const double moved = 3.0 * static_cast<double>(page_bytes);
    if (Runner::counts)
      for (const Counts& counts : {gathered, scattered}) {
        check_sectors(counts.writes.sectors, moved);
        // With small slices it is page numbers that are read.
        if (format == 0) check_sectors(counts.reads.sectors, moved);
      }
  }
}

/// What a mask keeps, moved by the kernel, against the same by hand.
template <class Layout, class Quant, class Runner = HostRunner>
void check_compact(int page_tokens, bool table_a_head) {
  CAPTURE(page_tokens, table_a_head);
  constexpr int heads = 2;
  const std::vector<int> lengths = {420, 0, 33, 5};
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
  const int rows = static_cast<int>(lengths.size()),
            row_entries = (lengths[0] + page_tokens - 1) / page_tokens;
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
  for (auto& word : keep) word = static_cast<std::uint32_t>(random.next() | random.next());
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

  Arrays arrays = page_arrays(cache);
  arrays.insert(arrays.end(),
                {read_array(entries, "entries"), read_array(lengths, "lengths"), read_array(keep, "keep"),
                 written_array(positions, "positions"), written_array(kept, "kept")});
  const Counts counts = Runner::compact(view, batch, args, arrays);
  CHECK(counts.bank_conflicts == 0);
  // Smaller tiles of parameters share sectors with those of other heads.
  const PageFormat format = page_format<Layout, Quant>(heads, page_tokens);
  if (Runner::counts && format.key_params.tile_bytes % 32 == 0 && format.value_params.tile_bytes % 32 == 0) {
    double read = 0, written = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto kept_tokens = static_cast<double>(expected[i].tokens.size());
      const double codes =
          kept_tokens / page_tokens * static_cast<double>(format.keys.tile_bytes + format.values.tile_bytes);
      // Three in four tokens stay: some in every sector.
      const auto params = [&](double tokens) {
        return std::ceil(tokens / page_tokens) *
               static_cast<double>(format.key_params.tile_bytes + format.value_params.tile_bytes);
      };
      read += codes + params(lengths[i / heads]);
      written += codes + params(kept_tokens);
    }
    check_sectors(counts.reads.sectors, read);
    check_sectors(counts.writes.sectors, written);
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

template <class Quant, class Runner = HostRunner>
void check_stats(int exact_sink_pages = 0) {
  using Layout = Gqa<64, 64>;
  constexpr int heads = 2, dims = 64, page_tokens = 64, length = 222;
  PagedCache<Layout, Quant> cache({.shape = {1, heads, dynamic},
                                   .pages = 8,
                                   .exact_pages = exact_format<Quant> == coded_format ? 0 : 4,
                                   .exact_sink_pages = exact_sink_pages});
  poison(cache);
  Random random(5);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, length));
  run_step(cache, std::move(step), random);
  const auto view = cache.view(LayerId{0});
  std::vector<std::int32_t> entries, tokens;
  const SequenceInfo info = *cache.sequence(id);
  for (const TablePage& page : info.pages) {
    entries.push_back(page.entry.raw);
    tokens.push_back(std::min(page_tokens, length - page.begin.value));
  }
  entries.push_back(-1);
  tokens.push_back(page_tokens);
  tokens[1] = 0;  // as of a page that is used again
  const auto planes = static_cast<std::size_t>(12 * heads * dims);
  AlignedVector<float> min(planes, -1.0f), max(planes, -1.0f), mean(planes, -1.0f);
  const cuda::KeyStatsArgs args{entries.data(), tokens.data(), static_cast<std::int32_t>(entries.size()),
                                min.data(),     max.data(),    mean.data(),
                                {0, 8, 0}};
  Arrays arrays = page_arrays(cache, false);
  arrays.insert(arrays.end(),
                {written_array(min, "min"), written_array(max, "max"), written_array(mean, "mean"),
                 read_array(entries, "entries"), read_array(tokens, "tokens")});
  const Counts counts = Runner::key_stats(view, args, arrays);
  if (Runner::counts) {
    double read = 0, written = 0;
    for (std::size_t i = 0; i + 1 < entries.size(); ++i) {
      const bool exact = TableEntry{entries[i]}.format() != coded_format;
      const PageFormat format =
          exact ? page_format<Layout, FormatQuant<exact_format<Quant>, Quant>>(heads, page_tokens)
                : page_format<Layout, FormatQuant<0, Quant>>(heads, page_tokens);
      read += heads * static_cast<double>(format.keys.tile_bytes + format.key_params.tile_bytes) * tokens[i] /
              page_tokens;
      written += heads * 3.0 * dims * sizeof(float);
    }
    // Parameters are asked for at every token: then they are in a cache.
    constexpr bool has_params = exact_format<Quant> != coded_format;
    check_sectors(has_params ? counts.reads.distinct : counts.reads.sectors, read);
    check_sectors(counts.writes.sectors, written);
    CHECK(counts.bank_conflicts == 0);
  }
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

}  // namespace kvfolia_tests::simt
