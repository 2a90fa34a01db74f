// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What the host's context computes, held against the documentation of PTX, and what it counts.

#include <cmath>
#include <cstdint>
#include <vector>

#include "kvfolia/core/fp16.hpp"
#include "simt/host_context.hpp"
#include "simt/ptx_layouts.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia_tests;
using namespace kvfolia_tests::simt;
using kvfolia::bf16;
using kvfolia::fp16;

namespace {

constexpr LaunchConfig one_warp{.threads = 32, .shared_bytes = 1024, .shared_granule = 2};

/// Runs body(context) in one warp.
template <class Body>
Counts run(const Body& body, std::uint64_t seed = 1) {
  GlobalMemory none;
  return launch(one_warp, none, seed, body);
}

template <class T, class Mma>
void check_mma(const Mma& mma) {
  Random random(7);
  float a[16][16], b[16][8], c[16][8];
  for (auto& row : a)
    for (float& x : row) x = static_cast<float>(T(random.gauss()));
  for (auto& row : b)
    for (float& x : row) x = static_cast<float>(T(random.gauss()));
  for (auto& row : c)
    for (float& x : row) x = random.gauss();
  const auto word = [](float low, float high) {
    return std::uint32_t{T(low).bits} | std::uint32_t{T(high).bits} << 16;
  };
  float result[16][8];
  run([&](HostContext& ctx) {
    const int lane = ctx.lane();
    std::uint32_t left[4], right[2];
    float sums[4];
    for (int r = 0; r < 4; ++r) {
      const ptx::Element low = ptx::mma_a(lane, 2 * r), high = ptx::mma_a(lane, 2 * r + 1);
      left[r] = word(a[low.row][low.col], a[high.row][high.col]);
    }
    for (int r = 0; r < 2; ++r) {
      const ptx::Element low = ptx::mma_b(lane, 2 * r), high = ptx::mma_b(lane, 2 * r + 1);
      right[r] = word(b[low.row][low.col], b[high.row][high.col]);
    }
    for (int i = 0; i < 4; ++i) sums[i] = c[ptx::mma_c(lane, i).row][ptx::mma_c(lane, i).col];
    mma(ctx, sums, left, right);
    for (int i = 0; i < 4; ++i) result[ptx::mma_c(lane, i).row][ptx::mma_c(lane, i).col] = sums[i];
  });
  for (int row = 0; row < 16; ++row)
    for (int col = 0; col < 8; ++col) {
      double sum = double{c[row][col]}, size = std::fabs(sum);
      for (int k = 0; k < 16; ++k) {
        sum += double{a[row][k]} * double{b[k][col]};
        size += std::fabs(double{a[row][k]} * double{b[k][col]});
      }
      // 16 additions in float, each rounded once.
      CHECK(std::fabs(double{result[row][col]} - sum) <= 16 * 0x1p-24 * size);
    }
}

/// The fp16 that is nearest, an even one of two: found among all, without any conversion under test.
fp16 nearest_fp16(double x) {
  std::uint32_t best = 0;
  const double magnitude = std::fabs(x);
  if (magnitude >= 65520.0) return fp16::from_bits(std::signbit(x) ? 0xfc00 : 0x7c00);
  for (std::uint32_t step = 0x4000; step > 0; step /= 2)  // the largest that is not larger
    if (best + step < 0x7c00 && static_cast<double>(static_cast<float>(
                                    fp16::from_bits(static_cast<std::uint16_t>(best + step)))) <= magnitude)
      best += step;
  const auto value = [](std::uint32_t bits) {
    return bits == 0x7c00
               ? 65536.0
               : static_cast<double>(static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(bits))));
  };
  const double below = magnitude - value(best), above = value(best + 1) - magnitude;
  if (above < below || (above == below && best % 2 == 1)) ++best;
  return fp16::from_bits(static_cast<std::uint16_t>(best | (std::signbit(x) ? 0x8000u : 0u)));
}

}  // namespace

TEST_CASE("mma multiplies matrices that lie as PTX documents") {
  check_mma<fp16>([](HostContext& ctx, auto& d, const auto& a, const auto& b) { ctx.mma_fp16(d, a, b); });
  check_mma<bf16>([](HostContext& ctx, auto& d, const auto& a, const auto& b) { ctx.mma_bf16(d, a, b); });
}

TEST_CASE("ldmatrix reads rows from the lanes that PTX documents, as they are and transposed") {
  const auto mark = [](int matrix, int row, int col) {
    return static_cast<std::uint16_t>(1000 + matrix * 64 + row * 8 + col);
  };
  for (const bool transposed : {false, true})
    run([&](HostContext& ctx) {
      // Matrix m lies at 128 m, its rows in reverse order.
      const auto row_at = [](int matrix, int row) {
        return static_cast<std::uint32_t>(matrix * 128 + (7 - row) * 16);
      };
      for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i) {
          const int element = ctx.lane() * 2 + i;
          ctx.store_shared(row_at(matrix, element / 8) + static_cast<std::uint32_t>(element % 8 * 2),
                           mark(matrix, element / 8, element % 8));
        }
      ctx.sync_warp();
      std::uint32_t row = 0;
      for (int matrix = 0; matrix < 4; ++matrix)
        for (int r = 0; r < 8; ++r)
          if (ptx::ldmatrix_address_lane(matrix, r) == ctx.lane()) row = row_at(matrix, r);
      std::uint32_t words[4];
      if (transposed)
        ctx.ldmatrix_x4_trans(words, row);
      else
        ctx.ldmatrix_x4(words, row);
      for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i) {
          const ptx::Element e =
              transposed ? ptx::ldmatrix_trans_element(ctx.lane(), i) : ptx::ldmatrix_element(ctx.lane(), i);
          CHECK(static_cast<std::uint16_t>(words[matrix] >> 16 * i) == mark(matrix, e.row, e.col));
        }
    });
}

TEST_CASE("movmatrix transposes what lies as PTX documents") {
  run([](HostContext& ctx) {
    std::uint32_t word = 0;
    for (int i = 0; i < 2; ++i) {
      const ptx::Element e = ptx::ldmatrix_element(ctx.lane(), i);
      word |= static_cast<std::uint32_t>(e.row * 8 + e.col) << 16 * i;
    }
    const std::uint32_t transposed = ctx.movmatrix(word);
    for (int i = 0; i < 2; ++i) {
      const ptx::Element e = ptx::movmatrix_source(ctx.lane(), i);
      CHECK((transposed >> 16 * i & 0xffff) == static_cast<std::uint32_t>(e.row * 8 + e.col));
    }
  });
}

TEST_CASE("prmt chooses bytes as PTX documents, for every selector") {
  bool same = true;
  for (std::uint32_t selector = 0; selector < 0x10000; ++selector)
    same = same && HostContext::prmt(0x8f7e6d5cu, 0x01234f9bu, selector) ==
                       ptx::prmt(0x8f7e6d5cu, 0x01234f9bu, selector);
  CHECK(same);
}

TEST_CASE("shuffles and votes reach every lane") {
  run([](HostContext& ctx) {
    const int lane = ctx.lane();
    CHECK(ctx.shfl(lane * 10, 31 - lane) == (31 - lane) * 10);
    CHECK(ctx.shfl(std::int64_t{lane} << 40, 3) == std::int64_t{3} << 40);
    CHECK(ctx.shfl_xor(static_cast<float>(lane), 5) == static_cast<float>(lane ^ 5));
    CHECK(ctx.ballot(lane % 3 == 0) == 0x49249249u);
    CHECK(ctx.any(lane == 17));
    CHECK_FALSE(ctx.any(lane == 32));
  });
}

TEST_CASE("pairs of fp16 are added and multiplied with one rounding") {
  Random random(3);
  int wrong = 0;
  const auto value = [](std::uint32_t bits) {
    return static_cast<double>(static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(bits))));
  };
  const auto finite = [&] {
    for (;;) {
      const auto bits = static_cast<std::uint32_t>(random.between(0, 65535));
      if ((bits & 0x7c00) != 0x7c00) return bits;
    }
  };
  for (int i = 0; i < 100'000; ++i) {
    const std::uint32_t a = finite(), b = finite(), c = finite();
    const std::uint32_t sum = HostContext::add_fp16x2(a | b << 16, b | c << 16);
    wrong += (sum & 0xffff) != nearest_fp16(value(a) + value(b)).bits;
    wrong += sum >> 16 != nearest_fp16(value(b) + value(c)).bits;
    const std::uint32_t fused = HostContext::fma_fp16x2(a, b, c);
    wrong += (fused & 0xffff) != nearest_fp16(value(a) * value(b) + value(c)).bits;
  }
  CHECK(wrong == 0);
  CHECK(HostContext::pack_fp16x2(1.0f, -2.0f) == 0xc0003c00u);
  CHECK(HostContext::pack_bf16x2(1.0f, -2.0f) == 0xc0003f80u);
}

TEST_CASE("sectors are counted once a request, whatever the order of lanes") {
  std::vector<float> from(32 * 32);
  std::vector<float> to(32);
  GlobalMemory global;
  global.add(from.data(), from.size() * sizeof(float), "from", false);
  global.add(to.data(), to.size() * sizeof(float), "to", true);
  LaunchConfig config = one_warp;
  config.counts_requests = true;
  // The vector may begin anywhere: then a row touches one sector more.
  const std::uint64_t more = reinterpret_cast<std::uintptr_t>(from.data()) % 32 != 0;
  const auto reads = [&](auto index) {
    const Counts counts = launch(config, global, 5, [&](HostContext& ctx) {
      const float x = ctx.load(from.data() + index(ctx.lane()));
      ctx.store(to.data() + ctx.lane(), x);
    });
    CHECK(counts.writes.bytes == 128);
    CHECK(counts.writes.requests == 1);
    return counts.reads;
  };
  CHECK(reads([](int lane) { return lane; }).sectors == 4 + more);
  CHECK(reads([](int lane) { return 31 - lane; }).sectors == 4 + more);
  CHECK(reads([](int lane) { return lane * 32; }).sectors == 32);
  CHECK(reads([](int) { return 3; }).sectors == 1);
  CHECK(reads([](int) { return 3; }).bytes == 4);
}

TEST_CASE("bank conflicts are the passes beyond the first") {
  LaunchConfig config = one_warp;
  config.shared_bytes = 4096;
  config.shared_granule = 4;
  config.counts_requests = true;
  GlobalMemory none;
  const auto words = [&](auto word) {
    return launch(config, none, 2,
                  [&](HostContext& ctx) {
                    ctx.load_shared<std::uint32_t>(static_cast<std::uint32_t>(word(ctx.lane()) * 4));
                  })
        .bank_conflicts;
  };
  CHECK(words([](int lane) { return lane; }) == 0);
  CHECK(words([](int) { return 9; }) == 0);
  CHECK(words([](int lane) { return lane * 2; }) == 1);
  CHECK(words([](int lane) { return lane * 32; }) == 31);
  const auto rows = [&](auto row) {
    return launch(config, none, 2,
                  [&](HostContext& ctx) {
                    std::uint32_t r[4];
                    ctx.ldmatrix_x4(r, static_cast<std::uint32_t>(row(ctx.lane()) * 16));
                  })
        .bank_conflicts;
  };
  CHECK(rows([](int lane) { return lane; }) == 0);
  CHECK(rows([](int lane) { return lane * 8; }) == 4 * 7);
  CHECK(rows([](int lane) { return lane * 8 + lane % 8; }) == 0);  // turned by the row, nothing collides
}
