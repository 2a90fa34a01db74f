// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// One writer, many readers: meant to run under the thread sanitizer.

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "support/scenario.hpp"

using namespace kvfolia_tests;

TEST_CASE("readers attend over committed batches while the writer goes on") {
  using Layout = Gqa<8, 4>;
  constexpr int heads = 2;
  PagedCache<Layout, Int8, SinkWindow> cache({.shape = {1, 1, dynamic}, .pages = 400}, {}, SinkWindow{4, 32});
  const auto view = cache.view(LayerId{0});
  Random random(3);

  // The newest batch, handed over under a lock; the writer destroys batches, readers only read.
  std::mutex mutex;
  std::shared_ptr<const Batch> newest;
  std::atomic<bool> done{false};
  std::atomic<int> reads{0}, failures{0};
  const auto read = [&](std::uint64_t seed) {
    Random mine(seed);
    while (!done) {
      std::shared_ptr<const Batch> batch;
      {
        const std::lock_guard lock(mutex);
        batch = newest;
      }
      if (!batch) continue;
      Attention a = Attention::make<Layout>(mine, batch->tokens(), heads);
      const auto plan = cpu::plan_attend(view, *batch, {heads, 1});
      std::vector<std::byte> workspace(plan ? plan->workspace_bytes() : 0);
      if (!plan || !cpu::attend(view, *batch, a.args, *plan, workspace, cpu::serial)) ++failures;
      for (const float x : a.out) failures += std::isnan(x) ? 1 : 0;
      ++reads;
    }
  };
  std::thread readers[] = {std::thread(read, 1), std::thread(read, 2), std::thread(read, 3)};

  std::vector<SeqId> sequences;
  std::vector<std::shared_ptr<const Batch>> batches;
  for (int i = 0; i < 300 || reads < 100; ++i) {
    Step change = cache.begin_step();
    while (sequences.size() < 4) sequences.push_back(*change.create());
    if (i % 7 == 3) sequences.push_back(*change.fork(sequences[0]));
    if (sequences.size() > 6) {
      REQUIRE(change.release(sequences.back()));
      sequences.pop_back();
    }
    change.commit();
    Step step = cache.begin_step();
    bool room = true;
    for (const SeqId id : sequences) room = room && step.extend(id, random.between(1, 3));
    // Slow readers keep retired pages from being reused; the step is then rolled back.
    if (room) batches.push_back(std::make_shared<const Batch>(run_step(cache, std::move(step), random)));
    if (!batches.empty()) {
      const std::lock_guard lock(mutex);
      newest = batches.back();
    }
    // A batch may go when no reader has it any more.
    std::erase_if(batches, [](const auto& batch) { return batch.use_count() == 1; });
    if (i % 50 == 0) CHECK(cache.verify().empty());
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(failures == 0);
}
