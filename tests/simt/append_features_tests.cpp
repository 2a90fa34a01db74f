// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What kernels that write pages do beside encoding: other layouts and element types, an engine's own pages,
// slots that are nowhere, rotary embedding; what they move, and what the host refuses.

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <string>

#include "quant/golden.hpp"
#include "simt/append_scenario.hpp"

using namespace kvfolia_tests;
using simt::check_same_bytes;

namespace {

using Latent = Sections<Section<Fp8Blocks<>, 128>, Section<Identity<bf16>, 64, 16>>;

/// Lines of the golden file, by quantizer, dims and what they hold.
const std::map<std::string, std::string>& golden() {
  static const std::map<std::string, std::string> lines = [] {
    std::map<std::string, std::string> all;
    std::ifstream file(KVF_TEST_GOLDEN);
    std::string name, order, dims, what, bytes;
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      if (words >> name >> order >> dims >> what >> bytes && order == "slot")
        all[name + ' ' + dims + ' ' + what] = bytes;
    }
    return all;
  }();
  return lines;
}

/// Has a block write tokens of keys as they are: golden ones are not rounded to exact pages' type first.
template <int Dims, class Quant>
void check_golden(const std::string& name, const Quant& quant = {}) {
  CAPTURE(name, Dims);
  using Layout = Gqa<Dims, dynamic>;
  using cuda::detail::WriteKind;
  constexpr int tokens = Quant::seal_tokens > 8 ? 2 * Quant::seal_tokens : 8;
  const std::vector<float> rows = golden_inputs(Dims * tokens);
  std::vector<std::byte> codes(static_cast<std::size_t>(code_bytes<Quant>(Dims) * tokens));
  std::vector<std::byte> params(static_cast<std::size_t>(Quant::param_bytes(Dims, tokens)));
  PagedView<Layout, Quant> view;
  view.page_tokens = tokens;
  view.quant = quant;
  view.formats[0].pages = 1;
  view.formats[0].keys = {codes.data(), 0, 0, code_bytes<Quant>(Dims)};
  view.formats[0].key_params = {params.data(), 0, 0, Quant::param_bytes(Dims, tokens) / tokens};
  const cuda::detail::WriteArgs<Layout, Quant> args{
      view, {.keys = {rows.data(), Dims, Dims}}, nullptr, 0, nullptr, 0};
  simt::GlobalMemory global;
  global.add(rows.data(), rows.size() * 4, "rows", false);
  global.add(codes.data(), codes.size(), "codes", true);
  global.add(params.data(), params.size(), "params", true);
  using All = cuda::detail::Shares<Layout, Quant, WriteKind::recodes>;
  simt::launch({.grid = {1, 1, cuda::detail::sizes_of(All()).count},
                .threads = cuda::detail::write_threads,
                .shared_bytes = cuda::detail::sizes_of(All()).shared_bytes,
                .shared_granule = 1},
               global, 5, [&](simt::HostContext& ctx) {
                 cuda::detail::with_share(ctx, All(), [&](auto share, bool second) {
                   using Share = decltype(share);
                   if (second || Share::side == cuda::detail::SideKind::values || Share::format != 0) return;
                   const cuda::detail::PageWriter<simt::HostContext, Layout, Quant, Share> writer(ctx, args,
                                                                                                  second);
                   constexpr int tile = Share::Part::Shape::rows;
                   for (int first = 0; first < tokens; first += tile) {
                     const int row = ctx.thread(), count = std::min(tile, tokens - first);
                     if (row < tile) writer.set_place(row, {row < count ? 0 : -1, first + row});
                     ctx.sync();
                     writer.load_tokens(first, 0);
                     ctx.sync();
                     writer.write({0, first});
                     ctx.sync();
                   }
                 });
               });
  const std::string key = name + ' ' + std::to_string(Dims);
  CHECK(golden().at(key + " codes") == golden_hex(codes));
  if (!params.empty()) CHECK(golden().at(key + " params") == golden_hex(params));
}

/// Some tokens of two heads in pages of 16, written at once.
template <int Dims, class Quant>
struct Written {
  using Layout = Gqa<Dims, 16>;
  static constexpr int heads = 2;
  PagedCache<Layout, Quant> cache;
  Random random{3};
  Batch batch;
  NewTokens<Layout> tokens;

  explicit Written(int count)
      : cache(CacheConfig{
            .shape = {1, heads, dynamic}, .pages = 16, .exact_pages = exact_format<Quant> == 0 ? 0 : 2}) {
    poison(cache);
    Step step = cache.begin_step();
    REQUIRE(step.extend(*step.create(), count));
    batch = step.commit();
    tokens = random_tokens<Layout>(random, count, heads);
  }
  simt::Counts write(const AppendArgs& args, bool counts_requests = false) {
    simt::GlobalMemory global;
    add_pages(global, cache);
    if (args.rope.cos_sin) {
      global.add(args.rope.cos_sin, 64 * sizeof(float) * static_cast<std::size_t>(args.rope.dims), "cos_sin",
                 false);
      global.add(args.rope.positions, sizeof(std::int32_t) * static_cast<std::size_t>(batch.tokens()),
                 "positions", false);
    }
    return append(global, cache.view(LayerId{0}), BatchView(batch), args, batch.tokens(), 11,
                  counts_requests);
  }
  simt::Counts write() { return write(tokens.args(heads)); }
  std::vector<float> key(int token, int head) const {
    std::vector<float> values(Dims);
    const auto view = cache.view(LayerId{0});
    const PhysSlot slot{BatchView(batch).slots[token]};
    visit_format(view, slot.entry(16), [&](const auto& quant) {
      key_side(quant).decode(view.key_tile(slot.entry(16), head), slot.slot(16), values.data());
    });
    return values;
  }
};

/// Bytes that two heads' tiles of a page have.
template <class Quant>
double page_bytes(int page_tokens) {
  const auto format = page_format<Gqa<128, dynamic>, Quant>(2, page_tokens);
  return 2.0 * static_cast<double>(format.keys.tile_bytes + format.values.tile_bytes +
                                   format.key_params.tile_bytes + format.value_params.tile_bytes);
}

/// What 64 tokens that come at once, sealed by blocks or one by one, touch.
template <class Quant>
void check_append_traffic() {
  using L = Gqa<128, 64>;
  constexpr int heads = 2, tokens = 64;
  PagedCache<L, Quant> cache(
      CacheConfig{.shape = {1, heads, dynamic}, .pages = 2, .exact_pages = exact_format<Quant> == 0 ? 0 : 1});
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), tokens));
  const Batch batch = step.commit();
  Random random(2);
  const auto rows = random.gauss(tokens * heads * 128);
  AlignedVector<fp16> halves(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) halves[i] = fp16(rows[i]);
  const ConstTensor tensor{halves.data(), heads * 128, 128};
  simt::GlobalMemory global;
  add_pages(global, cache);
  const simt::Counts counts = append(global, cache.view(LayerId{0}), BatchView(batch),
                                     AppendArgs{tensor, tensor, {}}, batch.tokens(), 1, true);
  simt::check_sectors(counts.reads.sectors, 2.0 * tokens * heads * 128 * 2);
  simt::check_sectors(counts.writes.sectors, page_bytes<FormatQuant<0, Quant>>(64));
  CHECK(counts.bank_conflicts == 0);
}

/// What a page that gets fewer bits touches.
template <class Quant>
void check_demotion_traffic() {
  PagedCache<Gqa<128, 64>, Quant> cache(
      CacheConfig{.shape = {1, 2, dynamic}, .pages = 2, .exact_pages = 1, .low_pages = 1});
  Random random(6);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 64));
  run_step(cache, std::move(step), random);
  Step demoting = cache.begin_step();
  REQUIRE(demoting.demote(id, 0));
  const Batch batch = demoting.commit();
  REQUIRE((batch.tokens() == 0 && BatchView(batch).recode_count == 1));
  simt::GlobalMemory global;
  add_pages(global, cache);
  const simt::Counts counts =
      append(global, cache.view(LayerId{0}), BatchView(batch), AppendArgs{}, 0, 1, true);
  using High = FormatQuant<coded_format, Quant>;
  // Parameters are asked for with every channel: then they are in a cache.
  constexpr bool has_params = High::param_bytes(128, 64) > 0;
  simt::check_sectors(has_params ? counts.reads.distinct : counts.reads.sectors, page_bytes<High>(64));
  simt::check_sectors(counts.writes.sectors, page_bytes<FormatQuant<low_format<Quant>, Quant>>(64));
  CHECK(counts.bank_conflicts == 0);
}

}  // namespace

TEST_CASE("kernels write golden bytes: floats and 8 bits") {
  check_golden<64, Identity<float>>("fp32");
  check_golden<64, Identity<fp16>>("fp16");
  check_golden<64, Identity<bf16>>("bf16");
  check_golden<64, Int8>("int8");
  check_golden<64, Int8Groups<32>>("int8-g32");
  check_golden<64, Fp8<>>("fp8");
  check_golden<64, Fp8<fp8_e5m2>>("fp8-e5m2");
  check_golden<64>("fp8-tensor", Fp8Tensor<>::calibrated(3.0f));
  check_golden<256, Fp8Blocks<>>("fp8-blocks");
  check_golden<64, Q8_0>("q8_0");
  check_golden<128, Rotated<Int8>>("int8+rotated");
  check_golden<96, Rotated<Int8>>("int8+rotated");
  check_golden<192, Latent>("sections");
}
TEST_CASE("kernels write golden bytes: 4 bits") {
  check_golden<64, Int4<32>>("int4-g32");
  check_golden<80, Int4<32>>("int4-g32");
  check_golden<64, Int4<0>>("int4");
  check_golden<64, Nvfp4>("nvfp4");
  check_golden<64>("nvfp4-calibrated", Nvfp4::calibrated(3.0f));
  check_golden<64, Mxfp4>("mxfp4");
  check_golden<64, Q4_0>("q4_0");
}
TEST_CASE("kernels write golden bytes: blocks of tokens") {
  check_golden<64, Int4Channels<32>>("kivi4");
  check_golden<80, Int4Channels<64>>("kivi4-g64");
  check_golden<64, Compact4Channels<32>>("compact4");
  check_golden<80, Rotated<Compact4Channels<16>>>("compact4-g16+rotated");
  check_golden<64, Centered<Int8>>("int8+centered");
  check_golden<64, Rotated<Centered<Int4<32>>>>("int4-g32+centered+rotated");
}

TEST_CASE("kernels write the CPU's bytes: head dims and latents") {
  check_same_bytes<Gqa<80, dynamic>, Int4<32>>(3);
  check_same_bytes<Gqa<96, dynamic>, KeyValue<Centered<Int8, 16>, Int8>>(16);
  check_same_bytes<Gqa<128, dynamic>, Rotated<Compact4Channels<16>>>(16);
  check_same_bytes<Gqa<256, dynamic>, Rotated<Int8>>(16);
  check_same_bytes<Mla<128, 64, dynamic>, Latent>(16, 1);
  check_same_bytes<Mla<512, 64, dynamic>, Identity<bf16>>(4);
}

TEST_CASE("kernels take rows of every element type") {
  const auto check = [](auto element) {
    using T = decltype(element);
    Written<64, Int8> by_kernels(19), by_cpu(19);
    std::vector<T> keys, values;
    for (const float x : by_cpu.tokens.keys) keys.push_back(T(x));
    for (const float x : by_cpu.tokens.values) values.push_back(T(x));
    const AppendArgs args{{keys.data(), 128, 64}, {values.data(), 128, 64}, {}};
    by_kernels.write(args);
    REQUIRE(cpu::append(by_cpu.cache.view(LayerId{0}), by_cpu.batch, args, cpu::serial));
    CHECK(std::memcmp(by_kernels.cache.store().data(0, 0), by_cpu.cache.store().data(0, 0),
                      static_cast<std::size_t>(16 * by_cpu.cache.store().page_bytes(0))) == 0);
  };
  check(float{});
  check(fp16{});
  check(bf16{});
}

TEST_CASE("slots of -1 are skipped, in an engine's own pages") {
  // [page][slot][head][dim], as engines have it; an int8 for every value and a scale a token and head.
  using Layout = Gqa<64, 4>;
  constexpr int pages = 3, heads = 2;
  std::vector<std::int8_t> codes(pages * 4 * heads * 64 * 2, 77);
  std::vector<fp16> scales(pages * 4 * heads * 2, fp16(5.0f));
  PagedView<Layout, Int8> view;
  view.kv_heads = heads;
  const auto plane = [](auto* base, std::int64_t row) {
    const auto bytes = static_cast<std::int64_t>(sizeof(*base)) * row;
    return PlaneView{reinterpret_cast<std::byte*>(base), 4 * heads * bytes, bytes, heads * bytes};
  };
  view.formats[0] = {plane(codes.data(), 64), plane(codes.data() + pages * 4 * heads * 64, 64),
                     plane(scales.data(), 1), plane(scales.data() + pages * 4 * heads, 1), pages};
  Random random(4);
  const auto rows = random_tokens<Layout>(random, 4, heads);
  const std::int64_t slots[] = {5, -1, -1, 10};
  BatchView batch;
  batch.slots = slots;
  const auto before = codes;
  simt::GlobalMemory global;
  global.add(codes.data(), codes.size(), "codes", true);
  global.add(scales.data(), scales.size() * 2, "scales", true);
  append(global, view, batch, rows.args(heads), 4, 3);
  for (int slot = 0; slot < pages * 4; ++slot)
    for (int head = 0; head < heads; ++head) {
      const auto at = static_cast<std::size_t>(slot * heads + head);
      const bool written = slot == 5 || slot == 10;
      CHECK((static_cast<float>(scales[at]) == 5.0f) != written);
      CHECK(std::equal(before.begin() + static_cast<std::ptrdiff_t>(at * 64),
                       before.begin() + static_cast<std::ptrdiff_t>(at * 64 + 64),
                       codes.begin() + static_cast<std::ptrdiff_t>(at * 64)) != written);
      if (!written) continue;
      const std::size_t token = slot == 5 ? 0 : 3;
      for (std::size_t d = 0; d < 64; ++d) {
        const float x = rows.keys[(token * heads + static_cast<std::size_t>(head)) * 64 + d];
        const float scale = static_cast<float>(scales[at]);
        CHECK(std::fabs(scale * static_cast<float>(codes[at * 64 + d]) - x) <= 0.51f * scale);
      }
    }
}

TEST_CASE("new keys are rotated on their way into pages") {
  constexpr int tokens = 21;
  for (const bool interleaved : {false, true}) {
    for (const int dims : {64, 32}) {
      CAPTURE(interleaved, dims);
      std::vector<float> table(static_cast<std::size_t>(64 * dims));
      for (int p = 0; p < 64; ++p)
        for (int i = 0; i < dims / 2; ++i) {
          const double angle = p * std::pow(10000.0, -2.0 * i / dims);
          table[static_cast<std::size_t>(p * dims + i)] = static_cast<float>(std::cos(angle));
          table[static_cast<std::size_t>(p * dims + dims / 2 + i)] = static_cast<float>(std::sin(angle));
        }
      std::int32_t positions[tokens];
      for (int t = 0; t < tokens; ++t) positions[t] = (t * 37 + 11) % 64;
      const int first = 64 - dims;
      Written<64, Identity<float>> by_kernels(tokens), by_cpu(tokens);
      AppendArgs args = by_kernels.tokens.args(2);
      args.rope = {table.data(), positions, first, dims, interleaved};
      by_kernels.write(args);
      REQUIRE(cpu::append(by_cpu.cache.view(LayerId{0}), by_cpu.batch, args, cpu::serial));
      double worst = 0.0;
      for (int t = 0; t < tokens; ++t)
        for (int head = 0; head < 2; ++head) {
          const auto got = by_kernels.key(t, head);
          CHECK(got == by_cpu.key(t, head));
          std::vector<double> expected;
          for (int d = 0; d < 64; ++d)
            expected.push_back(by_kernels.tokens.keys[static_cast<std::size_t>((t * 2 + head) * 64 + d)]);
          for (int i = 0; i < dims / 2; ++i) {
            const int a = first + (interleaved ? 2 * i : i), b = interleaved ? a + 1 : a + dims / 2;
            const double angle = positions[t] * std::pow(10000.0, -2.0 * i / dims);
            const auto x = expected[static_cast<std::size_t>(a)], y = expected[static_cast<std::size_t>(b)];
            expected[static_cast<std::size_t>(a)] = x * std::cos(angle) - y * std::sin(angle);
            expected[static_cast<std::size_t>(b)] = x * std::sin(angle) + y * std::cos(angle);
          }
          for (std::size_t d = 0; d < 64; ++d) worst = std::max(worst, std::fabs(got[d] - expected[d]));
        }
      CHECK(worst < 1e-6);  // a few roundings of numbers up to 4
    }
  }
  // Coded as a whole, and rotated against outliers too: the same bytes as the CPU's.
  using Q = KeyValue<Rotated<Centered<Int8, 16>>, Int8>;
  std::vector<float> table(64 * 64, 0.5f);
  std::int32_t positions[40];
  for (int t = 0; t < 40; ++t) positions[t] = t;
  Written<64, Q> by_kernels(40), by_cpu(40);
  AppendArgs args = by_kernels.tokens.args(2);
  args.rope = {table.data(), positions, 0, 64, false};
  by_kernels.write(args);
  REQUIRE(cpu::append(by_cpu.cache.view(LayerId{0}), by_cpu.batch, args, cpu::serial));
  for (int t = 0; t < 40; ++t) CHECK(by_kernels.key(t, 1) == by_cpu.key(t, 1));
}

TEST_CASE("kernels clamp what fp8 cannot hold, and show what is not finite") {
  if (is_checked) return;  // which trap
  const float inputs[] = {1000.0f, 464.0f, 465.0f, 1e10f, -1e10f, NAN, INFINITY, 448.0f};
  Written<64, Fp8Tensor<>> pages(8);
  for (std::size_t t = 0; t < 8; ++t)
    for (std::size_t d = 0; d < 128; ++d) pages.tokens.keys[t * 128 + d] = inputs[t];
  pages.write();
  for (const int t : {0, 1, 2, 3, 7}) CHECK(pages.key(t, 0)[5] == 448.0f);
  CHECK(pages.key(4, 0)[5] == -448.0f);
  for (const int t : {5, 6}) CHECK(std::isnan(pages.key(t, 1)[63]));
  Written<64, Int8> scaled(3);
  scaled.tokens.keys[70] = NAN;
  for (std::size_t d = 128; d < 256; ++d) scaled.tokens.keys[d] = 1e-30f;
  scaled.write();
  CHECK(std::isfinite(scaled.key(0, 0)[6]));
  for (const float x : scaled.key(0, 1)) CHECK(std::isnan(x));
  for (const float x : scaled.key(1, 0)) CHECK(x == 0.0f);
}
TEST_CASE("kernels code constant groups, values far from 0, and no padding") {
  Written<96, Int4<32>> pages(4);
  for (std::size_t i = 0; i < pages.tokens.keys.size(); ++i) {
    const std::size_t token = i / 192, group = i % 96 / 32;
    const float constants[] = {9.0f, 0.0f, -3.5f};
    const auto step = static_cast<float>(i % 96) / 95.0f;
    pages.tokens.keys[i] = token == 0   ? constants[group]
                           : token == 1 ? 600.0f + 0.05f * (2.0f * step - 1.0f)
                           : token == 2 ? 5.0f + step
                                        : 1e-8f;
  }
  pages.write();
  for (std::size_t d = 0; d < 96; ++d) {
    CHECK(pages.key(0, 0)[d] == (d < 32 ? 9.0f : d < 64 ? 0.0f : -3.5f));
    CHECK(std::fabs(pages.key(1, 1)[d] - 600.0f) <= 0.5f);
    // A third of [5, 6] a group: half of its fifteenth.
    CHECK(std::fabs(pages.key(2, 0)[d] - (5.0f + static_cast<float>(d) / 95.0f)) <= 1.02f / 90.0f + 0x1p-8f);
    CHECK(std::fabs(pages.key(3, 1)[d]) <= 0x1p-24f);
  }
}

TEST_CASE("kernels that write pages move what they must") {
  check_append_traffic<Identity<fp16>>();
  check_append_traffic<Int8>();
  check_append_traffic<Int4<0>>();
  check_append_traffic<Int4<32>>();
  check_append_traffic<Rotated<Int8>>();
  check_append_traffic<KeyValue<Int4Channels<32>, Int4<32>>>();
  check_append_traffic<KeyValue<Centered<Int8>, Int8>>();
  check_append_traffic<Compact4Channels<32>>();
  check_demotion_traffic<Mixed<Fp8Tensor<>, Int4<0>>>();
  check_demotion_traffic<Mixed<Int8, KeyValue<Int4Channels<32>, Int4<32>>>>();
}

TEST_CASE("append() says what it cannot be given") {
  Written<64, Int8> pages(3);
  const auto view = pages.cache.view(LayerId{0});
  const BatchView batch = pages.batch;
  const AppendArgs good = pages.tokens.args(2);
  const auto refuses = [&](const auto& v, const BatchView& b, const AppendArgs& args, std::int32_t tokens,
                           const std::string& subject) {
    const auto ok = cuda::detail::check_write(v, b, args, tokens);
    REQUIRE(!ok);
    CHECK(ok.error().code == Errc::invalid_argument);
    CHECK(std::string(ok.error().subject).find(subject) != std::string::npos);
  };
  CHECK(cuda::detail::check_write(view, batch, good, 3));
  refuses(view, batch, good, -1, "config.tokens");
  const auto with = [&](auto change, const std::string& subject) {
    auto v = view;
    BatchView b = batch;
    AppendArgs args = good;
    change(v, b, args);
    refuses(v, b, args, 3, subject);
  };
  with([](auto&, auto& b, auto&) { b.slots = nullptr; }, "batch.slots");
  with([](auto&, auto& b, auto&) { b.recode_count = 1, b.recodes = nullptr; }, "batch.recodes");
  with([](auto&, auto&, auto& a) { a.keys.data = nullptr; }, "args.keys");
  with([](auto&, auto&, auto& a) { a.values.data = nullptr; }, "args.values");
  with([](auto&, auto&, auto& a) { a.keys.token_stride = 129; }, "args.keys (alignment");
  with([](auto&, auto&, auto& a) { a.values.data = static_cast<const float*>(a.values.data) + 1; },
       "args.values (alignment");
  with([](auto& v, auto&, auto&) { v.formats[0].keys.base += 1; }, "view.formats.keys (alignment)");
  with([](auto& v, auto&, auto&) { v.kv_heads = 0; }, "view.kv_heads");
  float table[64] = {};
  std::int32_t positions[3] = {};
  with([&](auto&, auto&, auto& a) { a.rope = {table, nullptr, 0, 64, false}; }, "args.rope.positions");
  with([&](auto&, auto&, auto& a) { a.rope = {table, positions, 0, 63, false}; }, "args.rope.dims");
  with([&](auto&, auto&, auto& a) { a.rope = {table, positions, 2, 64, false}; }, "args.rope.first_dim");
  PagedCache<Mla<128, 64, 16>, Latent> latent({.shape = {1, 1, dynamic}, .pages = 1});
  AppendArgs torn = good;
  torn.rope = {table, positions, 96, 64, false};
  refuses(latent.view(LayerId{0}), batch, torn, 3, "two sections");
  static_assert(!cuda::append_supported<Gqa<64, 16, DimMajor<4>>, Int8>());
  static_assert(!cuda::append_supported<Gqa<63, 16>, Int8>());
}
