// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A GPU's thread as the context of kernel bodies: one instruction a call.
// Source: PTX ISA, sections on cp.async, ldmatrix, movmatrix, mma, prmt, lop3, ex2 and shfl.sync.

#include <cuda_runtime.h>

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cuda/context.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "kvfolia: its CUDA kernels need compute capability 8.0 or newer"
#endif

namespace kvfolia::inline KVF_ABI::cuda {

class DeviceContext {
 public:
  __device__ __forceinline__ DeviceContext()
      : shared_(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory()))),
        // Behind a shuffle the compiler knows that a warp's threads agree.
        warp_(__shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / warp_size, 0)) {}

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % warp_size; }
  __device__ __forceinline__ int warp() const { return warp_; }
  __device__ __forceinline__ int block_x() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int block_y() const { return static_cast<int>(blockIdx.y); }
  __device__ __forceinline__ int block_z() const { return static_cast<int>(blockIdx.z); }

  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  template <class T>
  __device__ __forceinline__ T shfl(T value, int lane) {
    return __shfl_sync(all_lanes, value, lane);
  }
  template <class T>
  __device__ __forceinline__ T shfl_xor(T value, int mask) {
    return __shfl_xor_sync(all_lanes, value, mask);
  }
  __device__ __forceinline__ std::uint32_t ballot(bool vote) { return __ballot_sync(all_lanes, vote); }
  __device__ __forceinline__ bool any(bool vote) { return __any_sync(all_lanes, vote) != 0; }

  template <class T>
  __device__ __forceinline__ T load(const T* from) {
    return *from;
  }
  template <class T>
  __device__ __forceinline__ void store(T* to, T value) {
    *to = value;
  }
  template <class T>
  __device__ __forceinline__ T load_shared(SharedOffset at) {
    return *reinterpret_cast<const T*>(shared_memory() + at);
  }
  template <class T>
  __device__ __forceinline__ void store_shared(SharedOffset at, T value) {
    *reinterpret_cast<T*>(shared_memory() + at) = value;
  }

  template <int Bytes>
  __device__ __forceinline__ void cp_async(SharedOffset to, const void* from) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    if constexpr (Bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_ + to), "l"(global(from))
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_ + to), "l"(global(from)),
                   "n"(Bytes)
                   : "memory");
  }
  template <int Bytes>
  __device__ __forceinline__ void cp_async(SharedOffset to, const void* from, bool valid) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    const int read = valid ? Bytes : 0;
    if constexpr (Bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_ + to), "l"(global(from)),
                   "r"(read)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_ + to), "l"(global(from)),
                   "n"(Bytes), "r"(read)
                   : "memory");
  }
  __device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int InFlight>
  __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(InFlight) : "memory");
  }

  __device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], SharedOffset row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_ + row)
                 : "memory");
  }
  __device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedOffset row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_ + row)
                 : "memory");
  }
  __device__ __forceinline__ std::uint32_t movmatrix(std::uint32_t x) {
    std::uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
  }
  __device__ __forceinline__ void mma_fp16(float (&d)[4], const std::uint32_t (&a)[4],
                                           const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                           const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  __device__ __forceinline__ static std::uint32_t prmt(std::uint32_t a, std::uint32_t b,
                                                       std::uint32_t selector) {
    std::uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
  }
  /// By name: of two constants the compiler makes two instructions.
  __device__ __forceinline__ static std::uint32_t and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    std::uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  __device__ __forceinline__ static int popc(std::uint32_t x) { return __popc(x); }
  __device__ __forceinline__ static std::uint32_t add_fp16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  __device__ __forceinline__ static std::uint32_t fma_fp16x2(std::uint32_t a, std::uint32_t b,
                                                             std::uint32_t c) {
    std::uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  __device__ __forceinline__ static std::uint32_t e4m3x2_to_fp16x2(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
    std::uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<std::uint16_t>(codes)));
    return r;
#else
    // As fp16's exponent and mantissa they are too small by 2^8; 480, which no code is, stands for NaN.
    const std::uint32_t spread = prmt(codes, 0u, 0x1404);
    const std::uint32_t bits = and_or(spread >> 1, 0x3f803f80u, spread & 0x80008000u);
    const std::uint32_t values = fma_fp16x2(bits, 0x5c005c00u, 0x80008000u);  // + -0 keeps the sign of 0
    std::uint32_t nan;  // all ones where it is one
    asm("{ .reg .b32 m; and.b32 m, %1, 0x7fff7fff; set.eq.u32.f16x2 m, m, %2; mov.b32 %0, m; }"
        : "=r"(nan)
        : "r"(values), "r"(0x5f805f80u));
    return values | nan;
#endif
  }
  __device__ __forceinline__ static std::uint32_t pack_fp16x2(float first, float second) {
    std::uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
  }
  __device__ __forceinline__ static std::uint32_t pack_bf16x2(float first, float second) {
    std::uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
  }
  __device__ __forceinline__ static float exp2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  __device__ __forceinline__ static float log2(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  __device__ __forceinline__ static float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
  }
  __device__ __forceinline__ static float max(float a, float b) { return fmaxf(a, b); }

 private:
  static constexpr std::uint32_t all_lanes = 0xffffffffu;

  __device__ __forceinline__ static unsigned char* shared_memory() {
    // Not a template's: there can be one declaration of it.
    extern __shared__ __align__(128) unsigned char kvf_shared_memory[];
    return kvf_shared_memory;
  }
  __device__ __forceinline__ static std::size_t global(const void* pointer) {
    return __cvta_generic_to_global(pointer);
  }

  std::uint32_t shared_;  ///< where it begins, as instructions address it
  int warp_;
};
static_assert(KernelContext<DeviceContext>);

}  // namespace kvfolia::inline KVF_ABI::cuda
