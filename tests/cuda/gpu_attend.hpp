// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention by a GPU over what lies in the host's memory.

#include "kvfolia/cuda/plan.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/fp4.hpp"
#include "kvfolia/quant/fp8.hpp"
#include "kvfolia/quant/ggml.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/quant/key_value.hpp"
#include "kvfolia/quant/mixed.hpp"
#include "kvfolia/quant/rotated.hpp"
#include "support/kernel_memory.hpp"

namespace kvfolia_tests::gpu {

using Layout = Gqa<128, dynamic>;
using Kivi = KeyValue<Int4Channels<32>, Int4<32>>;
using CenteredKeys = KeyValue<Centered<Int8>, Int8>;
using RotatedCompact = Rotated<Compact4Channels<32>>;
using TwoFormats = Mixed<Int8, Int4<0>>;

/// Quantizers whose kernels are compiled, all for `Layout`.
#define KVF_GPU_QUANTIZERS(X) \
  X(Identity<fp16>)           \
  X(Identity<bf16>)           \
  X(Identity<float>)          \
  X(Int8)                     \
  X(Fp8<>)                    \
  X(Int4<0>)                  \
  X(Int4<32>)                 \
  X(Int4Symmetric<32>)        \
  X(Nvfp4)                    \
  X(Mxfp4)                    \
  X(Q8_0)                     \
  X(Kivi)                     \
  X(CenteredKeys)             \
  X(RotatedCompact)           \
  X(TwoFormats)

/// Whether there is a GPU that runs what was compiled.
bool is_available();

/// Brings all of a call to the GPU, runs it there, through a captured graph if wanted, and brings results
/// back.
template <class Quant>
Result<> attend(KernelCall<Layout, Quant> call, const cuda::AttendPlan& plan, bool captured);

}  // namespace kvfolia_tests::gpu
