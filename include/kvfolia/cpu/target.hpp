// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The instruction set that this translation unit is compiled for names the namespace of the CPU
// kernels, so that units with different flags can be linked into one program.

#if defined(__AVX512F__)
#define KVF_CPU_TARGET avx512
#elif defined(__AVX2__)
#define KVF_CPU_TARGET avx2
#elif defined(__SSE4_1__)
#define KVF_CPU_TARGET sse4
#elif defined(__ARM_NEON)
#define KVF_CPU_TARGET neon
#else
#define KVF_CPU_TARGET baseline
#endif
