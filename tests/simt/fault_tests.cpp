// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Small kernels, right and with faults planted in them: every fault is found, in whatever order threads run,
// and said so that one can find it, too.

#include <cstdint>
#include <string>
#include <vector>

#include "simt/host_context.hpp"
#include "support/catch.hpp"

using namespace kvfolia_tests;
using namespace kvfolia_tests::simt;

// Fibers that a fault stops are left behind on purpose, with all that they hold.
#if defined(__SANITIZE_ADDRESS__)
extern "C" int __lsan_is_turned_off() { return 1; }
#endif

namespace {

constexpr int threads = 64;
constexpr int seeds = 5;

/// What a kernel is stopped for, the same kind of fault with every seed; "" if it runs.
template <class Body>
std::string fault(const Body& body, LaunchConfig config = {.threads = threads, .shared_bytes = 4096}) {
  std::string found;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    GlobalMemory none;
    std::string now;
    try {
      launch(config, none, seed, body);
    } catch (const KernelFault& e) {
      now = e.what();
    }
    INFO("seed " << seed << ": " << now << "; before: " << found);
    REQUIRE((seed == 0 || now.empty() == found.empty()));
    found = now;
  }
  return found;
}

bool says(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
  return text.find(part) != std::string::npos;
}

int wrong_reads = 0;

/// Every thread writes a word and reads that of another.
template <class Between>
auto exchange(int distance, const Between& between) {
  return [=](HostContext& ctx) {
    ctx.store_shared(static_cast<std::uint32_t>(ctx.thread() * 4), ctx.thread());
    between(ctx);
    const int other = ctx.thread() ^ distance;
    wrong_reads += ctx.load_shared<int>(static_cast<std::uint32_t>(other * 4)) != other;
  };
}

const float numbers[threads * 4] = {};

/// A pipeline of a warp: copies of two stages in flight, each read by other lanes than those that copy.
struct Pipeline {
  int in_flight = 1;  ///< what the wait leaves
  bool syncs_behind_wait = true;
  bool syncs_behind_read = true;

  void operator()(HostContext& ctx) const {
    constexpr int stages = 2, steps = 6;
    const auto at = [&](int step, int lane) {
      return static_cast<std::uint32_t>((ctx.warp() * stages + step % stages) * 128 + lane * 4);
    };
    const auto copy = [&](int step) {
      if (step < steps) ctx.cp_async<4>(at(step, ctx.lane()), numbers + step * 32 + ctx.lane());
      ctx.cp_async_commit();
    };
    for (int s = 0; s < stages; ++s) copy(s);
    for (int step = 0; step < steps; ++step) {
      if (in_flight == 1)
        ctx.cp_async_wait<1>();
      else
        ctx.cp_async_wait<2>();
      if (syncs_behind_wait) ctx.sync_warp();
      ctx.load_shared<float>(at(step, 31 - ctx.lane()));
      if (syncs_behind_read) ctx.sync_warp();
      copy(step + stages);
    }
    ctx.cp_async_wait<0>();
  }
};

std::string pipeline_fault(const Pipeline& pipeline) {
  std::string found;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    GlobalMemory global;
    global.add(numbers, sizeof(numbers), "numbers", false);
    std::string now;
    try {
      launch({.threads = threads, .shared_bytes = 512}, global, seed, pipeline);
    } catch (const KernelFault& e) {
      now = e.what();
    }
    REQUIRE((seed == 0 || now.empty() == found.empty()));
    found = now;
  }
  return found;
}

}  // namespace

TEST_CASE("a missing barrier is a race, in whatever order threads run") {
  CHECK(fault(exchange(32, [](HostContext& ctx) { ctx.sync(); })).empty());
  CHECK(fault(exchange(1, [](HostContext& ctx) { ctx.sync_warp(); })).empty());
  CHECK(wrong_reads == 0);
  const std::string none = fault(exchange(1, [](HostContext&) {}));
  says(none, "race, ");
  says(none, "fault_tests.cpp:");
  says(fault(exchange(32, [](HostContext& ctx) { ctx.sync_warp(); })), "race, ");
}

TEST_CASE("operations of a warp do not order its memory") {
  says(fault(exchange(1, [](HostContext& ctx) { ctx.shfl(1, 0); })), "race, ");
  says(fault(exchange(1, [](HostContext& ctx) { ctx.any(true); })), "race, ");
}

TEST_CASE("a write must be behind all reads, whoever reads") {
  // All read word 0; then one thread writes it behind a barrier that some readers do not take part in.
  for (const int writer : {0, 5, 40}) {
    const auto body = [=](bool whole_block) {
      return [=](HostContext& ctx) {
        if (ctx.thread() == 63) ctx.store_shared(0u, 1);
        ctx.sync();
        ctx.load_shared<int>(0);
        if (whole_block)
          ctx.sync();
        else
          ctx.sync_warp();
        if (ctx.thread() == writer) ctx.store_shared(0u, 2);
      };
    };
    CHECK(fault(body(true)).empty());
    says(fault(body(false)), "race, ");
  }
}

TEST_CASE("copies are read behind a wait and a barrier, and not overwritten before") {
  CHECK(pipeline_fault({}).empty());
  says(pipeline_fault({.in_flight = 2}), "has not landed");
  says(pipeline_fault({.syncs_behind_wait = false}), "race, ");
  says(pipeline_fault({.syncs_behind_read = false}), "race, ");
}

TEST_CASE("copies that nobody waits for are found") {
  GlobalMemory global;
  global.add(numbers, sizeof(numbers), "numbers", false);
  const LaunchConfig config{.threads = 32, .shared_bytes = 512};
  const auto without_wait = [](HostContext& ctx) {
    ctx.cp_async<4>(static_cast<std::uint32_t>(ctx.lane() * 4), numbers + ctx.lane());
    ctx.cp_async_commit();
  };
  CHECK_THROWS_WITH(launch(config, global, 1, without_wait), contains_text("not waited for"));
  const auto without_commit = [](HostContext& ctx) {
    ctx.cp_async<4>(static_cast<std::uint32_t>(ctx.lane() * 4), numbers + ctx.lane());
    ctx.cp_async_wait<0>();
  };
  CHECK_THROWS_WITH(launch(config, global, 1, without_commit), contains_text("not committed"));
}

TEST_CASE("copies that are not valid read nothing and give zeros") {
  GlobalMemory none;
  launch({.threads = 32, .shared_bytes = 512}, none, 1, [](HostContext& ctx) {
    const auto at = static_cast<std::uint32_t>(ctx.lane() * 16);
    ctx.cp_async<16>(at, nullptr, false);
    ctx.cp_async_commit();
    ctx.cp_async_wait<0>();
    for (std::uint32_t i = 0; i < 4; ++i) CHECK(ctx.load_shared<std::uint32_t>(at + 4 * i) == 0);
  });
}

TEST_CASE("threads that part at a barrier are named, with where they wait") {
  const std::string parted = fault([](HostContext& ctx) {
    if (ctx.thread() < 48) {
      ctx.sync();
    } else {
      ctx.sync_warp();
    }
  });
  says(parted, "deadlock: ");
  says(parted, "0-47 at sync (");
  says(parted, "48-63 at sync_warp (");
  const std::string elsewhere = fault([](HostContext& ctx) {
    if (ctx.lane() < 3) {
      ctx.any(true);
    } else {
      ctx.any(true);
    }
  });
  says(elsewhere, "divergence: ");
  const std::string gone = fault([](HostContext& ctx) {
    if (ctx.thread() >= 60) return;
    ctx.sync();
  });
  says(gone, "deadlock: ");
  says(gone, "0-59 at sync (");
  says(gone, "60-63 have ended");
}

TEST_CASE("shared memory has bounds and alignment") {
  const auto read = [](std::uint32_t at) {
    return fault([=](HostContext& ctx) { ctx.load_shared<std::uint64_t>(at); });
  };
  CHECK(read(4088).empty());
  says(read(4096), "8 bytes at 4096 of 4096");
  says(read(0xfffffff8u), "of 4096");
  says(read(4), "not aligned");
  says(fault([](HostContext& ctx) {
         ctx.store_shared(static_cast<std::uint32_t>(ctx.thread() * 2), std::uint16_t{1});
       }),
       "no less than 4");
}

TEST_CASE("shared memory is NaN before it is written") {
  CHECK(fault([](HostContext& ctx) {
          const float x = ctx.load_shared<float>(0);
          if (x == x) std::abort();
        }).empty());
}

TEST_CASE("global memory has bounds, alignment, and one writer a byte") {
  std::vector<int> in(threads), out(threads);
  const auto stopped_by = [&](const auto& body) {
    GlobalMemory global;
    global.add(in.data(), in.size() * sizeof(int), "in", false);
    global.add(out.data(), out.size() * sizeof(int), "out", true);
    try {
      launch({.grid = {.x = 2}, .threads = threads}, global, 3, body);
    } catch (const KernelFault& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(stopped_by([&](HostContext& ctx) {
          if (ctx.block_x() == 0) ctx.store(&out[static_cast<std::size_t>(ctx.thread())], ctx.load(&in[0]));
        }).empty());
  says(stopped_by([&](HostContext& ctx) { ctx.load(in.data() + threads); }), "nobody gave the kernel");
  says(stopped_by([&](HostContext& ctx) {
         ctx.load(reinterpret_cast<const int*>(reinterpret_cast<const char*>(in.data()) + 2));
       }),
       "not aligned");
  says(stopped_by([&](HostContext& ctx) { ctx.store(in.data() + ctx.thread(), 1); }), "write to in");
  says(stopped_by([&](HostContext& ctx) { ctx.store(out.data() + ctx.thread(), 1); }),
       "second write to byte");
  says(stopped_by([&](HostContext& ctx) { ctx.store(out.data(), 1); }), "second write to byte");
  says(stopped_by([&](HostContext& ctx) {
         if (ctx.block_x() == 0)
           ctx.store(out.data() + ctx.thread(), 1);
         else
           ctx.load(out.data() + ctx.thread());
       }),
       "of out");
}

TEST_CASE("seeds choose the order, and the same seed the same one") {
  const auto order = [](std::uint64_t seed) {
    std::vector<int> ran;
    GlobalMemory none;
    launch({.threads = threads}, none, seed, [&](HostContext& ctx) { ran.push_back(ctx.thread()); });
    return ran;
  };
  CHECK(order(1) == order(1));
  CHECK(order(1) != order(2));
}
