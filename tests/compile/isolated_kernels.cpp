// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What an engine compiles once for every instruction set: kernels, over views that come from elsewhere.

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

using namespace kvfolia;

/// All kernels that read or write pages of one kind.
#define KVF_UNIT(name, ...)                                                                          \
  Result<> name##_append(const PagedView<__VA_ARGS__>& v, const BatchView& b, const AppendArgs& a) { \
    return cpu::append(v, b, a, cpu::serial);                                                        \
  }                                                                                                  \
  Result<cpu::AttendPlan> name##_plan(const PagedView<__VA_ARGS__>& v, const BatchView& b,           \
                                      const cpu::AttendConfig& c) {                                  \
    return cpu::plan_attend(v, b, c);                                                                \
  }                                                                                                  \
  Result<> name##_attend(const PagedView<__VA_ARGS__>& v, const BatchView& b, const AttendArgs& a,   \
                         const cpu::AttendPlan& p, std::span<std::byte> w) {                         \
    return cpu::attend(v, b, a, p, w, cpu::serial);                                                  \
  }

KVF_UNIT(int8, Gqa<64, 16>, Int8)
KVF_UNIT(key_value, Gqa<64, 32>, KeyValue<Rotated<Centered<Int4<32>>>, Rotated<Compact4Channels<32>>>)
KVF_UNIT(mixed, Gqa<64, 32>, Mixed<KeyValue<Fp8<>, Nvfp4>, KeyValue<Int4Channels<32>, Mxfp4>>)
KVF_UNIT(latent, Mla<128, 64, 16>, Sections<Section<Fp8Blocks<>, 128>, Section<Identity<bf16>, 64, 16>>)
KVF_UNIT(ggml, Gqa<64, 16>, KeyValue<Q8_0, Q4_0>)

Result<> unit_merge(const MergeArgs& args) { return cpu::merge(args, cpu::serial); }
Result<> unit_finish(const FinishArgs& args) { return cpu::finish(args, cpu::serial); }
