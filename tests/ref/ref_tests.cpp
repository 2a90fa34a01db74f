// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The oracle itself, against values worked out by hand.

#include "kvfolia/ref/attend.hpp"

#include <cmath>
#include <vector>

#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/layout/mla.hpp"
#include "kvfolia/quant/identity.hpp"
#include "support/catch.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

/// Three tokens in pages of two, one head of two dims; the second page comes first in memory.
struct Three {
  // Page 0 holds token 2, page 1 tokens 0 and 1.
  std::vector<float> keys = {2.0f, 0.0f, NAN, NAN, 0.0f, 0.0f, 1.0f, 0.0f};
  std::vector<float> values = {7.0f, 8.0f, NAN, NAN, 1.0f, 2.0f, 3.0f, 4.0f};
  std::vector<float> query = {1.0f, 5.0f};
  PagedView<Gqa<2, 2>, Identity<float>> view{};
  std::int32_t entries[2] = {1, 0}, indptr[2] = {0, 2}, lengths[1] = {3};
  BatchView batch{};
  AttendArgs args{};

  Three() {
    view.formats[0].keys = {reinterpret_cast<std::byte*>(keys.data()), 16, 0, 8};
    view.formats[0].values = {reinterpret_cast<std::byte*>(values.data()), 16, 0, 8};
    view.formats[0].pages = 2;
    batch.rows = 1;
    batch.table = {entries, indptr};
    batch.lengths = lengths;
    args.queries = {query.data(), 2, 2};
    args.scale = 1.0f;
  }

  /// Weights are those of tokens 0, 1 and 2 before normalization, `extra` the sink's.
  void check(double w0, double w1, double w2, double extra = 0.0) {
    const auto got = ref::attend(view, batch, args, 1);
    REQUIRE(got);
    const double sum = w0 + w1 + w2 + extra;
    CHECK(got->out[0] == Approx((w0 * 1 + w1 * 3 + w2 * 7) / sum).epsilon(1e-12));
    CHECK(got->out[1] == Approx((w0 * 2 + w1 * 4 + w2 * 8) / sum).epsilon(1e-12));
    CHECK(got->lse[0] == Approx(std::log(sum)).epsilon(1e-12));
  }
};

const double e = std::exp(1.0);

}  // namespace

TEST_CASE_METHOD(Three, "ref weighs tokens by the exponential of their scores") { check(1, e, e * e); }

TEST_CASE_METHOD(Three, "ref's default scale is one over the root of the key dim") {
  args.scale = 0.0f;
  check(1, std::exp(1 / std::sqrt(2.0)), std::exp(2 / std::sqrt(2.0)));
}

TEST_CASE_METHOD(Three, "ref caps scores softly, after the scale") {
  args.scale = 2.0f;
  args.soft_cap = 3.0f;
  check(1, std::exp(3 * std::tanh(2.0 / 3)), std::exp(3 * std::tanh(4.0 / 3)));
}

TEST_CASE_METHOD(Three, "ref adds the slope times the distance, which is not positive") {
  const float slope = 0.5f;
  args.alibi_slopes = &slope;
  check(std::exp(-1.0), std::exp(1 - 0.5), e * e);
}

TEST_CASE_METHOD(Three, "ref's sink logit takes weight and has no value; a partial result leaves it out") {
  const float sink = 1.5f;
  args.sink_logits = &sink;
  check(1, e, e * e, std::exp(1.5));
  args.partial = true;
  check(1, e, e * e);
}

TEST_CASE_METHOD(Three, "ref's causal mask hides later keys") {
  const std::int32_t position[] = {1};
  batch.query_pos = position;
  check(1, e, 0);
  args.causal = false;
  check(1, e, e * e);
}

TEST_CASE_METHOD(Three, "ref's window hides earlier keys but the sinks") {
  view.window = {.left = 0, .sink_tokens = 0};
  check(0, 0, e * e);
  view.window = {.left = 0, .sink_tokens = 1};
  check(1, 0, e * e);
}

TEST_CASE_METHOD(Three, "ref's custom mask is read least significant bit first") {
  const std::uint8_t bits[] = {0xff, 0b101};
  const std::int64_t offset[] = {1};
  args.mask = {bits, offset};
  check(1, 0, e * e);
}

TEST_CASE_METHOD(Three, "ref gives 0 and -infinity where there is no key") {
  lengths[0] = 0;
  indptr[1] = 0;
  const std::int32_t position[] = {0};
  batch.query_pos = position;
  const auto got = ref::attend(view, batch, args, 1);
  REQUIRE(got);
  CHECK(got->out == std::vector<double>{0.0, 0.0});
  CHECK(got->lse[0] == -INFINITY);
}

TEST_CASE("ref reads a latent vector's value from its first dims") {
  std::vector<float> latent = {1.0f, 2.0f, 0.0f, 5.0f, 6.0f, 1.0f};  // two tokens of [2 latent | 1 rope]
  std::vector<float> query = {0.0f, 0.0f, 1.0f};
  PagedView<Mla<2, 1, 2>, Identity<float>> view{};
  view.formats[0].keys = {reinterpret_cast<std::byte*>(latent.data()), 24, 0, 12};
  view.formats[0].pages = 1;
  const std::int32_t entry[] = {0}, indptr[] = {0, 1}, length[] = {2};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entry, indptr};
  batch.lengths = length;
  AttendArgs args;
  args.queries = {query.data(), 3, 3};
  args.scale = 1.0f;
  const auto got = ref::attend(view, batch, args, 1);
  REQUIRE(got);
  CHECK(got->out[0] == Approx((1 + e * 5) / (1 + e)));
  CHECK(got->out[1] == Approx((2 + e * 6) / (1 + e)));
}
