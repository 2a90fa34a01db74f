// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/calibration.hpp"

#include <vector>

#include "support/catch.hpp"

using namespace kvfolia_examples;

namespace {

std::vector<float> floats(std::size_t count, float value) { return std::vector<float>(count, value); }

}  // namespace

TEST_CASE("a recorder sees all keys and values, and changes nothing") {
  constexpr KvShape shape{2, 2, 1, 64};
  const KvOptions options{.policy = parse_policy("fp32"), .page_tokens = 2, .max_tokens = 8};
  const auto plain = make_kv_cache(shape, options);
  const auto recorded = make_kv_cache(shape, options);
  AmaxRecorder recorder(*recorded, shape);
  CHECK(recorder.seen().key_amax == 0.0f);

  const auto step = [&](KvCache& cache, SeqId sequence, std::int32_t tokens, std::size_t large) {
    const auto count = static_cast<std::size_t>(tokens) * 64;
    std::vector<float> keys = floats(count, 0.5f), values = floats(count, 0.25f);
    const std::vector<float> queries = floats(2 * count, 0.125f);
    keys[large] = -3.0f;
    values[large] = 7.0f;
    std::vector<float> out(2 * count);
    const KvCache::Row row{sequence, tokens};
    cache.begin({&row, 1});
    cache.attend(0, queries.data(), floats(count, 0.5f).data(), floats(count, 0.25f).data(), out.data());
    if (&cache == &recorder) CHECK(recorder.seen().key_amax < 1.0f);
    cache.attend(1, queries.data(), keys.data(), values.data(), out.data());
    cache.end();
    return out;
  };
  const SeqId a = plain->create(), b = recorder.create();
  // The very last number of a step of three tokens, then of one of a single token.
  CHECK(step(*plain, a, 3, 191) == step(recorder, b, 3, 191));
  CHECK(recorder.seen().key_amax == 3.0f);
  CHECK(recorder.seen().value_amax == 7.0f);
  CHECK(recorder.length(b) == 3);
  CHECK(recorder.report().pages_used == recorded->report().pages_used);
  CHECK(recorder.bits_per_value() == recorded->bits_per_value());
}
