// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// FlashInfer's decode over paged keys and values, planned by its own scheduler.

#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <memory>

#include "attend_cuda_case.hpp"

namespace {

using Params = flashinfer::BatchDecodeParams<half, half, half, std::int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;
constexpr auto no_rope = flashinfer::PosEncodingMode::kNone;

struct Buffers {
  static constexpr std::size_t bytes = std::size_t{256} << 20;
  static constexpr std::size_t int_bytes = std::size_t{8} << 20;
  void* floats = nullptr;
  void* ints = nullptr;
  void* host_ints = nullptr;
  Buffers() {
    cudaMalloc(&floats, bytes);
    cudaMalloc(&ints, int_bytes);
    cudaMallocHost(&host_ints, int_bytes);
  }
  ~Buffers() {
    cudaFree(floats);
    cudaFree(ints);
    cudaFreeHost(host_ints);
  }
};

template <std::uint32_t Group>
cudaError_t plan(const CudaCase& c, Buffers& buffers, flashinfer::DecodePlanInfo& info) {
  auto indptr = c.indptr;
  const auto estimate =
      flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<Group, CudaCase::dims, no_rope, Variant,
                                                                      Params>;
  return flashinfer::DecodePlan<CudaCase::dims, no_rope, Variant, Params>(
      buffers.floats, Buffers::bytes, buffers.ints, buffers.host_ints, Buffers::int_bytes, info,
      indptr.data(), static_cast<std::uint32_t>(c.rows), static_cast<std::uint32_t>(c.query_heads),
      static_cast<std::uint32_t>(c.page_tokens), false, nullptr, estimate);
}

}  // namespace

CudaDecode flashinfer_decode(const CudaCase& c) {
  auto buffers = std::make_shared<Buffers>();
  flashinfer::DecodePlanInfo info;
  cudaError_t planned = cudaErrorInvalidValue;
  switch (c.query_heads / c.kv_heads) {
    case 1: planned = plan<1>(c, *buffers, info); break;
    case 4: planned = plan<4>(c, *buffers, info); break;
    case 8: planned = plan<8>(c, *buffers, info); break;
    default: break;
  }
  return [=](const std::int32_t* table, cudaStream_t stream) -> cudaError_t {
    if (planned != cudaSuccess) return planned;
    const auto ints = [&](std::int64_t offset) {
      return reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(buffers->ints) + offset);
    };
    Params p;
    const std::int64_t page = c.page_bytes / 2;
    const std::int64_t strides[] = {page, std::int64_t{c.page_tokens} * CudaCase::dims, CudaCase::dims};
    p.paged_kv = flashinfer::paged_kv_t<half, std::int32_t>(
        static_cast<std::uint32_t>(c.kv_heads), static_cast<std::uint32_t>(c.page_tokens), CudaCase::dims,
        static_cast<std::uint32_t>(c.rows), flashinfer::QKVLayout::kHND, reinterpret_cast<half*>(c.pages),
        reinterpret_cast<half*>(c.pages + c.value_offset), strides, const_cast<std::int32_t*>(table),
        const_cast<std::int32_t*>(c.device_indptr), const_cast<std::int32_t*>(c.last_page_tokens));
    p.q = static_cast<half*>(const_cast<void*>(c.queries));
    p.o = static_cast<half*>(c.out);
    p.num_qo_heads = static_cast<std::uint32_t>(c.query_heads);
    p.q_stride_n = c.query_heads * CudaCase::dims;
    p.q_stride_h = CudaCase::dims;
    p.window_left = -1;
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(CudaCase::dims));
    p.padded_batch_size = static_cast<std::uint32_t>(info.padded_batch_size);
    p.request_indices = ints(info.request_indices_offset);
    p.kv_tile_indices = ints(info.kv_tile_indices_offset);
    p.o_indptr = ints(info.o_indptr_offset);
    p.kv_chunk_size_ptr = ints(info.kv_chunk_size_ptr_offset);
    half* sums = nullptr;
    float* logits = nullptr;
    if (info.split_kv) {
      sums = reinterpret_cast<half*>(static_cast<std::byte*>(buffers->floats) + info.v_offset);
      logits = reinterpret_cast<float*>(static_cast<std::byte*>(buffers->floats) + info.s_offset);
    }
    return flashinfer::BatchDecodeWithPagedKVCacheDispatched<CudaCase::dims, no_rope, Variant, Params>(
        p, sums, logits, false, stream);
  };
}
