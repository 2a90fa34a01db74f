// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The machine that the body of a CUDA kernel runs on, as a concept. cuda/device_context.cuh is a GPU's
// thread; tests have another one, which runs the same bodies on the host and checks what they do.

#include <concepts>
#include <cstdint>

#include "kvfolia/core/config.hpp"

/// In front of loops: those whose indices choose registers, and those that must stay loops. A host's compiler
/// does not know the pragma.
#if defined(__CUDA_ARCH__)
#define KVF_UNROLL _Pragma("unroll")
#define KVF_UNROLL_4 _Pragma("unroll 4")
#define KVF_NO_UNROLL _Pragma("unroll 1")
#else
#define KVF_UNROLL
#define KVF_UNROLL_4
#define KVF_NO_UNROLL
#endif
/// for (int i = 0; i < count; ++i), unrolled.
#define KVF_UNROLLED(i, count) \
  KVF_UNROLL                   \
  for (int i = 0; i < (count); ++i)

namespace kvfolia::inline KVF_ABI::cuda {

inline constexpr int warp_size = 32;

/// A place in the shared memory of a block, in bytes: one arena, whose size the launch gives.
using SharedOffset = std::uint32_t;

/// 16 bytes, the most that one instruction of a thread moves.
struct alignas(16) Words4 {
  std::uint32_t words[4];
};

/// What bodies ask of a context: PTX's operations by PTX's names. A body touches shared and global memory by
/// nothing else, so that a context can see it. All 32 threads of a warp call shfl, shfl_xor, ballot, any,
/// ldmatrix_*, movmatrix, mma_* and sync_warp together; all of a block sync. Of these only the two syncs
/// order what threads do to shared memory.
///
/// load and store: sizeof(T) bytes of global memory, aligned to that; so load_shared and store_shared.
/// cp_async<Bytes>(to, from, valid): 4, 8 or 16 bytes from global to shared memory; zeros, and nothing is
/// read, where not valid. They have landed, for this thread alone, behind cp_async_wait<N>, which leaves
/// the N newest groups, closed by cp_async_commit, in flight; 16 bytes do not go by way of the L1 cache.
///
/// ldmatrix_x4(r, row): four 8 x 8 matrices of 16-bit elements, the lanes' `row` being where their 32 rows
/// begin; _trans gives each matrix transposed. movmatrix(x): one such matrix, transposed. mma_fp16 and
/// mma_bf16(d, a, b): d += a * b, of 16 x 16, 16 x 8 and 16 x 8, sums in float.
///
/// Pairs of 16-bit floats lie in a word, the first one in its lower half; exp2, log2 and reciprocal may be a
/// few units in the last place off and flush subnormal numbers; max ignores one NaN.
template <class C>
concept KernelContext = requires(C& c, std::uint32_t word, std::int64_t wide, float x, bool flag,
                                 const Words4* from, Words4* to, std::uint32_t (&a)[4], std::uint32_t (&b)[2],
                                 float (&d)[4], SharedOffset at) {
  { c.thread() } -> std::same_as<int>;  // of the block
  { c.lane() } -> std::same_as<int>;
  { c.warp() } -> std::same_as<int>;  // the same for all its lanes, and known to be
  { c.block_x() } -> std::same_as<int>;
  { c.block_y() } -> std::same_as<int>;
  { c.block_z() } -> std::same_as<int>;
  c.sync();
  c.sync_warp();
  { c.shfl(wide, 0) } -> std::same_as<std::int64_t>;  // 4 or 8 bytes
  { c.shfl_xor(x, 1) } -> std::same_as<float>;
  { c.ballot(flag) } -> std::same_as<std::uint32_t>;
  { c.any(flag) } -> std::same_as<bool>;
  { c.load(from) } -> std::same_as<Words4>;
  c.store(to, Words4{});
  { c.template load_shared<float>(at) } -> std::same_as<float>;
  c.store_shared(at, x);
  c.template cp_async<16>(at, from);
  c.template cp_async<4>(at, from, flag);
  c.cp_async_commit();
  c.template cp_async_wait<1>();
  c.ldmatrix_x4(a, at);
  c.ldmatrix_x4_trans(a, at);
  { c.movmatrix(word) } -> std::same_as<std::uint32_t>;
  c.mma_fp16(d, a, b);
  c.mma_bf16(d, a, b);
  { C::prmt(word, word, word) } -> std::same_as<std::uint32_t>;
  { C::and_or(word, word, word) } -> std::same_as<std::uint32_t>;  // (a & b) | c
  { C::popc(word) } -> std::same_as<int>;
  { C::add_fp16x2(word, word) } -> std::same_as<std::uint32_t>;
  { C::fma_fp16x2(word, word, word) } -> std::same_as<std::uint32_t>;
  { C::e4m3x2_to_fp16x2(word) } -> std::same_as<std::uint32_t>;  // of the two lower bytes
  { C::pack_fp16x2(x, x) } -> std::same_as<std::uint32_t>;       // rounds to nearest, ties to even
  { C::pack_bf16x2(x, x) } -> std::same_as<std::uint32_t>;
  { C::exp2(x) } -> std::same_as<float>;
  { C::log2(x) } -> std::same_as<float>;
  { C::reciprocal(x) } -> std::same_as<float>;
  { C::max(x, x) } -> std::same_as<float>;
};

}  // namespace kvfolia::inline KVF_ABI::cuda
