// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "cuda/gpu_pages.hpp"

#include "cuda/gpu_copies.cuh"
#include "kvfolia/cuda.cuh"

namespace kvfolia_tests::gpu {

Result<> move(cuda::PageMove move, cuda::detail::MoveArgs args, const Arrays& arrays) {
  Copies copies;
  copies.bring(arrays);
  for (PageSlices& format : args.store.formats) copies.redirect(format.base);
  copies.redirect(args.copies);
  copies.redirect(args.pages);
  copies.redirect(args.buffer);
  return copies.run([&]() -> Result<> {
    switch (move) {
      case cuda::PageMove::copy: return cuda::copy_pages(args.store, args.copies, args.count, nullptr);
      case cuda::PageMove::gather:
        return cuda::gather_pages(args.store, args.format, args.pages, args.count, args.buffer, nullptr);
      case cuda::PageMove::scatter: break;
    }
    return cuda::scatter_pages(args.store, args.format, args.pages, args.count, args.buffer, nullptr);
  });
}

template <class Quant>
Result<> compact(PagedView<Layout, Quant> view, BatchView batch, cuda::CompactArgs args,
                 const Arrays& arrays) {
  Copies copies;
  copies.bring(arrays);
  copies.redirect(view);
  copies.redirect(batch.table.entries);
  copies.redirect(batch.lengths);
  copies.redirect(args.keep);
  copies.redirect(args.positions);
  copies.redirect(args.kept);
  return copies.run([&] { return cuda::compact(view, batch, args, nullptr); });
}

template <class Quant>
Result<> key_stats(PagedView<StatsLayout, Quant> view, cuda::KeyStatsArgs args, const Arrays& arrays) {
  Copies copies;
  copies.bring(arrays);
  copies.redirect(view);
  copies.redirect(args.entries);
  copies.redirect(args.tokens);
  copies.redirect(args.min);
  copies.redirect(args.max);
  copies.redirect(args.mean);
  return copies.run([&] { return cuda::key_stats(view, args, nullptr); });
}

#define KVF_COMPACT(...)                                                                             \
  template Result<> compact<__VA_ARGS__>(PagedView<Layout, __VA_ARGS__>, BatchView, cuda::CompactArgs, \
                                         const Arrays&);
#define KVF_STATS(...)                                                                          \
  template Result<> key_stats<__VA_ARGS__>(PagedView<StatsLayout, __VA_ARGS__>, cuda::KeyStatsArgs, \
                                           const Arrays&);
KVF_GPU_COMPACTS(KVF_COMPACT)
KVF_GPU_STATS(KVF_STATS)

}  // namespace kvfolia_tests::gpu
