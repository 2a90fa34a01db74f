// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The instruction set that this translation unit is compiled for names the namespace of the CPU
// kernels, so that units with different flags can be linked into one program. Units whose flags
// differ in what is not told apart here must not be mixed.

#if defined(__AVX512FP16__)
#define KVF_CPU_TARGET avx512fp16
#elif defined(__AVX512BF16__)
#define KVF_CPU_TARGET avx512bf16
#elif defined(__AVX512VNNI__)
#define KVF_CPU_TARGET avx512vnni
#elif defined(__AVX512F__)
#define KVF_CPU_TARGET avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define KVF_CPU_TARGET avx2fma
#elif defined(__AVX2__)
#define KVF_CPU_TARGET avx2
#elif defined(__AVX__) && defined(__FMA__)
#define KVF_CPU_TARGET avxfma
#elif defined(__AVX__)
#define KVF_CPU_TARGET avx
#elif defined(__SSE4_2__)
#define KVF_CPU_TARGET sse42
#elif defined(__SSE4_1__)
#define KVF_CPU_TARGET sse41
#elif defined(__ARM_FEATURE_SVE)
#define KVF_CPU_TARGET sve
#elif defined(__ARM_NEON)
#define KVF_CPU_TARGET neon
#else
#define KVF_CPU_TARGET baseline
#endif
