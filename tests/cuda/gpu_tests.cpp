// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The cases that the kernels' bodies pass on the host, launched on a GPU. Ends with 77 where there is none.

#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include <cstdio>

#include "cuda/gpu_attend.hpp"
#include "simt/decode_check.hpp"

using namespace kvfolia_tests;

namespace {

/// Every launch must give the same bits; those of a captured graph, too.
template <class Quant>
void check_decode(const simt::DecodeSetup& setup) {
  simt::check_decode_by<gpu::Layout, Quant>(
      setup, [](const auto& view, const BatchView& batch, const AttendArgs& args,
                const cuda::AttendPlan& plan, std::uint64_t seed) {
        const auto ok = gpu::attend<Quant>({view, batch, args, plan.config.query_heads}, plan, seed % 2 == 1);
        INFO((ok ? "" : ok.error().subject));
        REQUIRE(ok);
      });
}

template <class Quant>
void check_pages() {
  const int block = kvfolia::detail::largest_block<Quant>;
  for (const int page_tokens : {1, 3, 16, 64}) {
    if (page_tokens % block != 0) continue;
    for (const int group : {1, 5, 8, 16})
      check_decode<Quant>({.lengths = {1, 17, 33, 64, 65, 513, 4096},
                           .group = group,
                           .page_tokens = page_tokens,
                           .seeds = 4,
                           .exact_sink_pages = exact_format<Quant> == coded_format ? 0 : 1});
  }
}

}  // namespace

#define KVF_GPU_TEST(...) \
  TEST_CASE("a GPU agrees with ref: " #__VA_ARGS__) { check_pages<__VA_ARGS__>(); }
using namespace kvfolia_tests::gpu;
KVF_GPU_QUANTIZERS(KVF_GPU_TEST)

int main(int argc, char** argv) {
  if (!gpu::is_available()) {
    std::puts("skipped: there is no GPU of compute capability 8.0 or later");
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
