// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Highway, and the name of the instruction set that this translation unit is compiled for. It names the
// namespace of the CPU kernels, so that units with different flags can be linked into one program. Units
// whose flags differ in what is not told apart here must not be mixed.
//
// Kernels include Highway through this header only, for two settings that must come first.

// Highway has no target of SSE4 or later without AES, which kernels don't use, and which the flags
// x86-64-v2 to v4 and Haswell's lack.
#if defined(__SSE4_2__) && !(defined(__AES__) && defined(__PCLMUL__)) && !defined(HWY_DISABLE_PCLMUL_AES)
#define HWY_DISABLE_PCLMUL_AES
#endif
// Where the flags are those of AVX3_DL (Sapphire Rapids), Highway 1.0.3 takes it for the static target but
// compiles it only on demand, and ends with an #error.
#if defined(__AVXVNNI__) && defined(__AVX512VBMI2__) && !defined(HWY_WANT_AVX3_DL)
#define HWY_WANT_AVX3_DL
#endif
#include <hwy/highway.h>

#if HWY_TARGET != HWY_STATIC_TARGET
#error "kvfolia: include the CPU kernels before hwy/foreach_target.h: their target is that of the flags"
#endif

// What the compiler may use anywhere.
#if defined(__AVX512F__)
#define KVF_CPU_LEVEL avx512
#elif defined(__AVX2__)
#define KVF_CPU_LEVEL avx2
#elif defined(__AVX__)
#define KVF_CPU_LEVEL avx
#elif defined(__SSE4_2__)
#define KVF_CPU_LEVEL sse42
#elif defined(__SSE4_1__)
#define KVF_CPU_LEVEL sse41
#elif defined(__SSSE3__)
#define KVF_CPU_LEVEL ssse3
#elif defined(__ARM_FEATURE_SVE2)
#define KVF_CPU_LEVEL sve2
#elif defined(__ARM_FEATURE_SVE)
#define KVF_CPU_LEVEL sve
#elif defined(__ARM_NEON)
#define KVF_CPU_LEVEL neon
#else
#define KVF_CPU_LEVEL baseline
#endif

// KVF_CPU_IF(flag, name): the name where the compiler defines the flag as 1, else nothing. For a flag that
// is 1, KVF_CPU_PROBE_1 brings a comma, which makes the name the second argument.
#define KVF_CPU_PROBE_1 ,
#define KVF_CPU_SECOND(first, second, ...) second
#define KVF_CPU_SELECT(probe, name) KVF_CPU_SECOND(probe name, , )
#define KVF_CPU_PROBE(flag, name) KVF_CPU_SELECT(KVF_CPU_PROBE_##flag, name)
#define KVF_CPU_IF(flag, name) KVF_CPU_PROBE(flag, name)

#define KVF_CPU_PASTE(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h
#define KVF_CPU_JOIN(a, b, c, d, e, f, g, h) KVF_CPU_PASTE(a, b, c, d, e, f, g, h)

// Extensions that compilers choose by themselves or that kernels ask for by name.
#define KVF_CPU_BASICS                                                                                      \
  KVF_CPU_JOIN(KVF_CPU_IF(__FMA__, _fma), KVF_CPU_IF(__F16C__, _f16c), KVF_CPU_IF(__BMI2__, _bmi2),         \
               KVF_CPU_IF(__AVX512BW__, _bw), KVF_CPU_IF(__AVX512DQ__, _dq), KVF_CPU_IF(__AVX512VL__, _vl), \
               KVF_CPU_IF(__AVX512VBMI__, _vbmi), KVF_CPU_IF(__AVX512VBMI2__, _vbmi2))
#define KVF_CPU_PRODUCTS                                                             \
  KVF_CPU_JOIN(KVF_CPU_IF(__AVX512VNNI__, _vnni), KVF_CPU_IF(__AVXVNNI__, _avxvnni), \
               KVF_CPU_IF(__AVX512BF16__, _bf16), KVF_CPU_IF(__AVX512FP16__, _fp16), \
               KVF_CPU_IF(__AMX_TILE__, _amx), KVF_CPU_IF(__AMX_INT8__, int8),       \
               KVF_CPU_IF(__AMX_BF16__, bf16), )
#define KVF_CPU_ARM                                                                                   \
  KVF_CPU_JOIN(KVF_CPU_IF(__ARM_FEATURE_DOTPROD, _dot), KVF_CPU_IF(__ARM_FEATURE_MATMUL_INT8, _i8mm), \
               KVF_CPU_IF(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC, _bf16),                               \
               KVF_CPU_IF(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC, _fp16), , , , )

/// Such as avx2_fma_f16c_bmi2_N_AVX2; the end is Highway's own name for its static target.
#define KVF_CPU_TARGET \
  KVF_CPU_JOIN(KVF_CPU_LEVEL, KVF_CPU_BASICS, KVF_CPU_PRODUCTS, KVF_CPU_ARM, _, HWY_NAMESPACE, , )
