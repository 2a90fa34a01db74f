// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What must not change a bit of a row on the fast path: its company, threads, the order of work, and
// which pages it has.

#include "cpu/fast_rows.hpp"

using namespace kvfolia_tests;

namespace {

const std::vector<RowSpec> mixed_rows = {{1, 700}, {35, 300}, {4, 513}, {1, 257}, {5, 90},
                                         {2, 1},   {17, 256}, {1, 0},   {1, 1300}};

Asked everything() {
  return {.soft_cap = 20.0f, .alibi = true, .sinks = true, .masked = true, .window = {300, 5}};
}

void check_row(const RowResult& got, const RowResult& expected, const char* how, int row) {
  CAPTURE(how, row);
  CHECK(same_bits(got, expected));
}

}  // namespace

TEST_CASE("company, threads, order and pages change no bit on the fast path") {
  for (const PoolKind& kind : pool_kinds())
    for (const bool features : {false, true})
      for (const int group : {features ? 3 : 8}) {
        SceneSpec spec{.kind = &kind, .page_tokens = kind.pages.back() / 2, .kv_heads = 2, .group = group};
        spec.seed = static_cast<std::uint64_t>(group + 10 * features);
        spec.heads_inside = features;
        spec.positions = features ? Positions::gaps : Positions::dense;
        const Asked asked = features ? everything() : Asked{};
        CAPTURE(kind.name, group, features);
        const Scene scene(spec, mixed_rows);
        const auto expected = scene.attend(scene.all(), asked);
        const auto check_all = [&](const std::vector<RowResult>& got, const char* how) {
          for (std::size_t row = 0; row < got.size(); ++row)
            check_row(got[row], expected[row], how, static_cast<int>(row));
        };
        check_all(scene.attend(scene.all(), asked, {1, true}), "backwards");
        for (const int threads : {2, 3, 5})
          check_all(scene.attend(scene.all(), asked, {threads}), "several threads");
        for (int row = 0; row < scene.count(); ++row)
          for (const int threads : {1, 5})  // alone it is split
            check_row(scene.attend({row}, asked, {threads})[0], expected[static_cast<std::size_t>(row)],
                      threads == 1 ? "alone" : "alone on five threads", row);
        check_row(scene.attend({8, 6, 0, 5}, asked, {2})[2], expected[0], "with others", 0);
        spec.page_seed = 99;
        const Scene shuffled(spec, mixed_rows);
        check_all(shuffled.attend(shuffled.all(), asked), "other pages");
      }
}

TEST_CASE("what other rows hold changes no bit, even if it is not finite") {
  for (const PoolKind& kind : pool_kinds()) {
    SceneSpec spec{.kind = &kind, .page_tokens = 32, .kv_heads = 1, .group = 3};
    CAPTURE(kind.name);
    const Scene clean(spec, mixed_rows);
    spec.change = [](int row, int position, std::vector<float>& key, std::vector<float>& value) {
      if (row % 2 == 0) return;
      if (position % 3 == 0) key[0] = NAN;
      if (position % 3 == 1) value[1] = INFINITY;
    };
    const Scene spoiled(spec, mixed_rows);
    const auto expected = clean.attend(clean.all(), {}), got = spoiled.attend(spoiled.all(), {}, {3});
    for (std::size_t row = 0; row < got.size(); row += 2)
      check_row(got[row], expected[row], "beside NaN", static_cast<int>(row));
    CHECK(!std::isfinite(got[1].out.back()));
  }
}

TEST_CASE("sharing pages with other rows changes no bit") {
  for (const PoolKind& kind : pool_kinds())
    for (const Window window : {Window{}, Window{300, 4}, Window{37, 0}})
      for (const Positions positions : {Positions::dense, Positions::gaps}) {
        SceneSpec spec{.kind = &kind, .page_tokens = 32, .kv_heads = 2, .group = 3};
        spec.shared = 768;
        spec.absent = positions == Positions::gaps;
        spec.positions = positions;
        const std::vector<RowSpec> rows = {{1, 900}, {1, 801}, {1, 769}, {1, 700}, {1, 1030}, {3, 850}};
        const Scene scene(spec, rows);
        Asked asked;
        asked.window = window;
        asked.alibi = window.left == 37;
        CAPTURE(kind.name, window.left, static_cast<int>(positions));
        check_scene(scene, asked);
        const auto together = scene.attend(scene.all(), asked);
        const auto on_threads = scene.attend(scene.all(), asked, {3});
        for (int row = 0; row < scene.count(); ++row) {
          const auto i = static_cast<std::size_t>(row);
          check_row(together[i], scene.attend({row}, asked)[0], "alone", row);
          check_row(on_threads[i], together[i], "on threads", row);
        }
      }
}
