// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels allocate nothing: engines call them from loops that must not wait for an allocator.

#include <cstdlib>
#include <new>

#include "support/scenario.hpp"

// Sanitizers have an operator new of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {
thread_local long allocations = 0;
}

// Inlined, they look like a mismatch to GCC.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
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

#endif
