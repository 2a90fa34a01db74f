// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "cuda/gpu_append.hpp"

#include "cuda/gpu_copies.cuh"
#include "kvfolia/cuda.cuh"

namespace kvfolia_tests::gpu {

template <class Quant>
Result<> append(PagedView<Layout, Quant> view, BatchView batch, AppendArgs args, std::int32_t tokens,
                const Arrays& pages) {
  Copies copies;
  copies.bring(pages);
  copies.redirect(view);
  const auto bring = [&](auto*& array, std::size_t count) {
    using T = std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(array)>>>;
    array = static_cast<const T*>(copies.bring(array, count * sizeof(T), false));
  };
  bring(batch.slots, static_cast<std::size_t>(tokens));
  if (batch.recode_count > 0) bring(batch.recodes, static_cast<std::size_t>(batch.recode_count));
  for (ConstTensor* rows : {&args.keys, &args.values})
    rows->data = copies.bring(rows->data,
                              static_cast<std::size_t>(tokens * rows->token_stride) * sizeof(float), false);
  return copies.run([&] { return cuda::append(view, batch, args, {.tokens = tokens}, nullptr); });
}

#define KVF_INSTANTIATE(...)                                                                                 \
  template Result<> append<__VA_ARGS__>(PagedView<Layout, __VA_ARGS__>, BatchView, AppendArgs, std::int32_t, \
                                        const Arrays&);
KVF_GPU_QUANTIZERS(KVF_INSTANTIATE)

}  // namespace kvfolia_tests::gpu
