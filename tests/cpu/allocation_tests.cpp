// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels allocate nothing: engines call them from loops that must not wait for an allocator. Steps
// allocate, and leave no trace when there is no memory.

#include <cstdlib>
#include <new>

#include "support/scenario.hpp"

// Sanitizers have an operator new of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {
thread_local long allocations = 0;
thread_local long allowed = -1;  ///< so many more allocations succeed; -1: all
}

// Inlined, they look like a mismatch to GCC.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (allowed == 0) throw std::bad_alloc();
  if (allowed > 0) --allowed;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using namespace kvfolia_tests;

TEST_CASE("copying, appending, attending, merging and finishing allocate nothing") {
  using Layout = Gqa<64, 16>;
  PagedCache<Layout, Int8> cache(
      {.shape = {1, 2, dynamic}, .pages = 40, .exact_pages = 8, .exact_sink_pages = 1});
  Random random(1);
  Step first = cache.begin_step();
  const SeqId parent = *first.create();
  REQUIRE(first.extend(parent, 300));
  run_step(cache, std::move(first), random);
  Step step = cache.begin_step();
  REQUIRE((step.extend(*step.fork(parent), 3) && step.extend(parent, 1)));
  Batch batch = step.commit();
  REQUIRE(batch.copies().size() == 1);
  const auto tokens = random_tokens<Layout>(random, batch.tokens(), 2);
  const AppendArgs append = tokens.args(2);
  Attention a = Attention::make<Layout>(random, batch.tokens(), 4), b = a;
  a.args.partial = true;
  const auto view = cache.view(LayerId{0});
  const auto plan = cpu::plan_attend(view, batch, {4, 4});  // split over threads
  REQUIRE(!plan->merges.empty());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const MergeArgs merge{4, 4, 64, a.args.out, a.args.lse, a.args.out, a.args.lse};
  const FinishArgs finish{4, 4, 64, a.args.out, a.args.lse, a.args.out, a.args.lse};

  const long before = allocations;
  cache.store().copy(batch.copies(), cpu::serial);
  const bool ok = cpu::append(view, batch, append, cpu::serial) &&
                  cpu::attend(view, batch, a.args, *plan, workspace, cpu::serial) &&
                  cpu::merge(merge, cpu::serial) && cpu::finish(finish, cpu::serial);
  const long after = allocations;
  CHECK(ok);
  CHECK(after == before);
}

TEST_CASE("out of memory in a step changes nothing, and the step can be taken back") {
  // Every operation, with memory for 0, 1, 2, ... allocations.
  for (int operation = 0; operation < 6; ++operation)
    for (long allowance = 0; allowance < 12; ++allowance) {
      CAPTURE(operation, allowance);
      PagedCache<Gqa<8, 4>, Identity<float>, SinkWindow> cache({.shape = {1, 1, dynamic}, .pages = 60}, {},
                                                               SinkWindow{2, 5});
      SeqId id, shared;
      {
        Step step = cache.begin_step();
        id = *step.create();
        shared = *step.create();
        REQUIRE((step.extend(id, 30) && step.extend(shared, 6)));
        step.commit();
        Step fork = cache.begin_step();
        REQUIRE(fork.fork(shared));
        fork.commit();
      }
      const auto held = cache.stats().held;
      {
        Step step = cache.begin_step();
        allowed = allowance;
        try {
          if (operation == 0) static_cast<void>(step.create());
          if (operation == 1) static_cast<void>(step.extend(id, 20));
          if (operation == 2) static_cast<void>(step.extend(shared, 20));
          if (operation == 3) static_cast<void>(step.fork(id));
          if (operation == 4) static_cast<void>(step.truncate(id, 26));
          if (operation == 5 && step.release(id)) step.commit();
        } catch (const std::bad_alloc&) {
        }
        allowed = -1;
        CHECK(cache.verify().empty());
      }
      CHECK(cache.verify().empty());
      const bool released = !cache.sequence(id);
      CHECK((released ? operation == 5 : cache.stats().held == held && cache.sequence(id)->length == 30));
      Step next = cache.begin_step();
      REQUIRE(next.extend(*next.create(), 1));
      next.commit();
    }
}

TEST_CASE("taking a step back needs no memory") {
  PagedCache<Gqa<8, 4>, Identity<float>> cache({.shape = {1, 1, dynamic}, .pages = 60});
  {
    Step step = cache.begin_step();
    for (int i = 0; i < 20; ++i) REQUIRE(step.extend(*step.create(), 5));
    allowed = 0;
  }
  allowed = -1;
  CHECK(cache.stats().free == 60);
  CHECK(cache.verify().empty());
}

#endif
