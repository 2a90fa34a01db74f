// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// append() writes the very bytes that the quantizers' own encode() does, whatever instructions it is made of.

#include <bit>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int heads = 2, pages = 12;

/// Numbers of all kinds, a row at a time: ordinary ones, and those at which rounding can go wrong.
std::vector<float> hostile_row(Random& random, int dims) {
  std::vector<float> row;
  const int kind = random.between(0, 15);
  const float size = std::ldexp(1.0f, random.between(-30, 20));
  const auto any = [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(random.next())); };
  for (int d = 0; d < dims; ++d) {
    float x = random.gauss();
    if (kind == 1) x *= size;                                     // subnormal scales, clamped values
    if (kind == 2) x = random.between(0, 1) != 0 ? 0.0f : -0.0f;  // the sign of a zero min
    if (kind == 3) x = -size;                                     // constants
    if (kind == 4) x = d == 0 ? 127.0f : static_cast<float>(random.between(-254, 254)) * 0.5f;  // ties
    if (kind == 5) x = d == 0 ? 0.0f : static_cast<float>(random.between(0, 30)) * 0.5f;
    if (kind == 6) x *= 1e38f;
    if (kind == 7) x *= 1e-42f;
    if (kind == 8) x = any();  // among them NaN, infinities, subnormals
    if (kind == 9 && random.between(0, 20) == 0) x = any();
    if (kind == 10 && random.between(0, 40) == 0) x = random.between(0, 1) != 0 ? INFINITY : NAN;
    if (kind == 11) x = 65504.0f + static_cast<float>(random.between(-40, 40));
    if (kind == 12) x *= std::ldexp(1.0f, -20);  // fp16's subnormal values
    if (kind == 13) x = static_cast<float>(fp16(x)) + std::ldexp(1.0f, -11) * static_cast<float>(d % 3);
    if (kind == 14) x = -std::ldexp(1.0f, -26) * static_cast<float>(random.between(0, 3));
    row.push_back(x);
  }
  return row;
}

/// A plane of new tokens with gaps between heads and tokens.
template <class T>
struct Plane {
  int dims, head_stride, token_stride;
  std::vector<T> values;

  Plane(Random& random, int width, int tokens)
      : dims(width), head_stride(width + 3), token_stride(heads * head_stride + 5) {
    values.assign(static_cast<std::size_t>(tokens * token_stride), static_cast<T>(NAN));
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < heads; ++head) {
        const std::vector<float> row = hostile_row(random, dims);
        for (int d = 0; d < dims; ++d) {
          T& value = values[static_cast<std::size_t>(t * token_stride + head * head_stride + d)];
          const auto bits = std::bit_cast<std::uint32_t>(row[static_cast<std::size_t>(d)]);
          if constexpr (std::is_same_v<T, float>)
            value = row[static_cast<std::size_t>(d)];
          else if (random.between(0, 200) == 0)
            value.bits = static_cast<std::uint16_t>(bits);  // not what a conversion gives: signalling NaN
          else
            value = static_cast<T>(row[static_cast<std::size_t>(d)]);
        }
      }
  }
  ConstTensor tensor() const { return {values.data(), token_stride, head_stride}; }
};

/// Runs of 1 to 40 tokens in slots of their own, none of them twice, with tokens that go nowhere.
std::vector<std::int64_t> random_slots(Random& random, int page_tokens) {
  std::vector<std::int64_t> slots;
  std::set<std::int64_t> used;
  const int all = pages * page_tokens;
  for (int run = 0; run < 12; ++run) {
    const int length = random.between(1, 40), first = random.between(0, all - 1);
    for (int i = 0; i < length && first + i < all; ++i) {
      if (random.between(0, 30) == 0) slots.push_back(-1);
      if (random.between(0, 30) == 0) continue;
      if (used.insert(first + i).second) slots.push_back(first + i);
    }
  }
  return slots;
}

/// Runs items in an order of its own.
struct Scattered {
  int threads;
  int concurrency() const { return threads; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    for (std::int64_t odd = 0; odd < 2; ++odd)
      for (std::int64_t i = 1 - odd; i < n; i += 2) f(i, 0);
  }
};

template <int Dims, class Q, class Order>
void encode_plane(const Q& quant, const Tile<Order, std::byte>& tile, int slot, const ConstTensor& rows,
                  int token, int head) {
  float row[Dims];
  load_row(rows, token, head, Dims, row);
  to_stored(quant, row, Dims);
  quant.encode(tile, slot, 1, Rows{row, Dims});
}

/// All bytes of a cache that append() wrote to, and of one that encode() did.
template <class Layout, class Quant, class T>
void check_bytes(bool interleaved_heads) {
  using C = PagedCache<Layout, Quant>;
  static int runs = 0;
  const auto seed = static_cast<std::uint64_t>(++runs) + 1000 * Layout::key_dim;
  CAPTURE(seed, Layout::key_dim, Layout::page_tokens, std::string(__PRETTY_FUNCTION__));
  Random random(seed);
  const CacheConfig config{.shape = {1, heads, dynamic}, .pages = pages};
  C appended(config), encoded(config);
  poison(appended), poison(encoded);
  const auto slots = random_slots(random, Layout::page_tokens);
  const auto count = static_cast<std::int32_t>(slots.size());
  const Plane<T> keys(random, Layout::key_dim, count), values(random, Layout::value_dim, count);

  const auto view_of = [&](C& cache) {
    auto view = cache.view(LayerId{0});
    if (interleaved_heads)  // [page][slot][head][dim], as engines have it
      for (PlaneView* plane : {&view.formats[0].keys, &view.formats[0].values, &view.formats[0].key_params,
                               &view.formats[0].value_params}) {
        plane->head_stride = plane->slot_stride;
        plane->slot_stride *= heads;
      }
    return view;
  };
  BatchView batch;
  batch.rows = 1;
  const std::int32_t indptr[] = {0, count};
  batch.query_indptr = indptr;
  batch.slots = slots.data();
  AppendArgs args;
  args.keys = keys.tensor(), args.values = values.tensor();
  const auto to = view_of(appended), by_hand = view_of(encoded);
  const auto ok = cpu::append(to, batch, args, Scattered{random.between(1, 9)});
  if constexpr (is_checked) {
    if (!ok) {  // a number that is not finite: nothing is written
      CHECK(ok.error().code == Errc::non_finite_input);
      return;
    }
  }
  REQUIRE(ok);
  for (std::int32_t token = 0; token < count; ++token) {
    const PhysSlot where{slots[static_cast<std::size_t>(token)]};
    if (where.absent()) continue;
    const TableEntry entry = where.entry(Layout::page_tokens);
    const int slot = where.slot(Layout::page_tokens);
    for (int head = 0; head < heads; ++head) {
      encode_plane<Layout::key_dim>(key_side(by_hand.quant), by_hand.key_tile(entry, head), slot, args.keys,
                                    token, head);
      encode_plane<Layout::value_dim>(value_side(by_hand.quant), by_hand.value_tile(entry, head), slot,
                                      args.values, token, head);
    }
  }
  const auto bytes = static_cast<std::size_t>(appended.store().page_bytes(0) * pages);
  CHECK(std::memcmp(appended.store().data(0, 0), encoded.store().data(0, 0), bytes) == 0);
}

template <class Layout, class Quant>
void check_types(bool interleaved_heads = false) {
  for (int repeat = 0; repeat < 4; ++repeat) {
    check_bytes<Layout, Quant, float>(interleaved_heads);
    check_bytes<Layout, Quant, fp16>(interleaved_heads);
    check_bytes<Layout, Quant, bf16>(interleaved_heads);
  }
}

/// Keys and values in slot-major order; then strided.
template <int Dims, class Key, class Value>
void check_slots() {
  using Layout = Gqa<Dims, 32>;
  check_types<Layout, KeyValue<Key, Value>>();
  check_types<Layout, KeyValue<Key, Value>>(true);
}

}  // namespace

TEST_CASE("append writes encode's bytes for slot-major pages of every head dim") {
  check_slots<64, Int8, Int4<32>>();
  check_slots<80, Int4<32>, Int8Groups<32>>();
  check_slots<96, Int4Symmetric<32>, Rotated<Int8>>();
  check_slots<128, Identity<fp16>, Int8>();
  check_slots<128, Int4<0>, Rotated<Int4<64>>>();
  check_slots<256, Int8Groups<64>, Int4Symmetric<0>>();
  check_slots<256, Identity<bf16>, Identity<float>>();
}

TEST_CASE("append writes encode's bytes for head dims and groups that are no multiple of a vector") {
  check_slots<2, Int8, Int4<2>>();
  check_slots<7, Int8Groups<3>, Identity<fp16>>();
  check_slots<30, Int4<6>, Int4Symmetric<10>>();
  check_slots<42, Identity<bf16>, Int8Groups<5>>();
  check_slots<72, Int4<16>, Identity<float>>();
}

TEST_CASE("append writes encode's bytes in dim-major order") {
  check_types<Gqa<64, 32, DimMajor<4>, DimMajor<2>>, Int8>();
  check_types<Gqa<80, 8, DimMajor<8>, DimMajor<2>>, Int4<32>>();
  check_types<Gqa<96, 24, DimMajor<4>, DimMajor<1>>, Identity<fp16>>();
  check_types<Gqa<128, 32, DimMajor<4>, DimMajor<16>>, KeyValue<Rotated<Int4<32>>, Int4Symmetric<32>>>();
  check_types<Gqa<128, 64, DimMajor<2>, DimMajor<1>>, KeyValue<Identity<bf16>, Int8Groups<32>>>();
  check_types<Gqa<256, 32, DimMajor<1>, DimMajor<2>>, Identity<float>>();
  check_types<Gqa<36, 6, DimMajor<3>, DimMajor<6>>, KeyValue<Int8, Int4<12>>>();
  check_types<Gqa<4, 16, DimMajor<4>, DimMajor<2>>, Int8>();
}

TEST_CASE("append writes encode's bytes in pairs of slots") {
  check_types<Gqa<64, 32, SlotPairs<2>, SlotPairs<4>>, Int8>();
  check_types<Gqa<80, 8, SlotPairs<8>, SlotPairs<2>>, Identity<fp16>>();
  check_types<Gqa<96, 24, SlotPairs<3>, SlotPairs<1>>, Identity<bf16>>();
  check_types<Gqa<128, 32, DimMajor<4>, SlotPairs<2>>, KeyValue<Int8, Identity<bf16>>>();
  check_types<Gqa<256, 64, SlotPairs<64>, SlotPairs<4>>, KeyValue<Int8Groups<32>, Identity<float>>>();
  check_types<Gqa<6, 4, SlotPairs<2>, SlotPairs<4>>, Int8>();
}

TEST_CASE("quantizers without vectors of their own are written as before") {
  check_slots<64, Fp8<>, Q8_0>();
  check_types<Gqa<64, 32, DimMajor<4>, DimMajor<2>>, KeyValue<Fp8Blocks<>, Mxfp4>>();
}

TEST_CASE("one or two tokens in any slot are written as encode does") {
  using Layout = Gqa<64, 16, DimMajor<4>, SlotPairs<4>>;
  for (int slot = 0; slot < 31; ++slot)
    for (const int tokens : {1, 2}) {
      CAPTURE(slot, tokens);
      Random random(static_cast<std::uint64_t>(slot));
      PagedCache<Layout, Int8> appended({.shape = {1, 1, dynamic}, .pages = 2});
      PagedCache<Layout, Int8> encoded({.shape = {1, 1, dynamic}, .pages = 2});
      poison(appended), poison(encoded);
      const auto rows = random_tokens<Layout>(random, tokens, 1);
      const std::int64_t slots[] = {slot, slot + 1};
      const std::int32_t indptr[] = {0, tokens};
      BatchView batch;
      batch.rows = 1, batch.query_indptr = indptr, batch.slots = slots;
      REQUIRE(cpu::append(appended.view(LayerId{0}), batch, rows.args(1), cpu::serial));
      const auto view = encoded.view(LayerId{0});
      for (int t = 0; t < tokens; ++t) {
        const TableEntry entry{(slot + t) / 16};
        Int8{}.encode(view.key_tile(entry, 0), (slot + t) % 16, 1, Rows{rows.keys.data() + t * 64, 64});
        Int8{}.encode(view.value_tile(entry, 0), (slot + t) % 16, 1, Rows{rows.values.data() + t * 64, 64});
      }
      CHECK(std::memcmp(appended.store().data(0, 0), encoded.store().data(0, 0),
                        static_cast<std::size_t>(appended.store().page_bytes(0) * 2)) == 0);
    }
}

TEST_CASE("vectors convert every number as the storage types do") {
  if constexpr (cpu::detail::has_exact_vectors) {
    int wrong = 0;
    const auto check = [&](const auto* from, auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      cpu::detail::convert_row<64>(from, to);
      for (int i = 0; i < 64; ++i) {
        const To right = Identity<To>::round(static_cast<float>(from[i]));
        wrong += std::memcmp(&right, to + i, sizeof(To)) != 0 ? 1 : 0;
      }
    };
    fp16 halves[64];
    bf16 brains[64];
    float floats[64];
    for (std::uint32_t first = 0; first < 0x10000; first += 64) {
      fp16 from_half[64];
      bf16 from_brain[64];
      for (std::uint32_t i = 0; i < 64; ++i) {
        from_half[i] = fp16::from_bits(static_cast<std::uint16_t>(first + i));
        from_brain[i] = bf16::from_bits(static_cast<std::uint16_t>(first + i));
      }
      check(from_half, halves), check(from_half, brains), check(from_half, floats);
      check(from_brain, halves), check(from_brain, brains), check(from_brain, floats);
    }
    // All upper halves of a float, with the lower halves around ties.
    for (std::uint32_t upper = 0; upper < 0x10000; upper += 1) {
      float from[64];
      for (std::uint32_t i = 0; i < 64; ++i)
        from[i] = std::bit_cast<float>((upper << 16) | ((i / 4 * 0x1000u + i % 4 - 2u) & 0xffffu));
      check(from, halves), check(from, brains), check(from, floats);
    }
    CHECK(wrong == 0);
  }
}
