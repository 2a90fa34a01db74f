// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Caches of 8- and 4-bit floating-point numbers.

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

constexpr std::tuple quantizers{
    Named<Fp8<>>{"fp8"},
    Named<Fp8<fp8_e5m2>>{"fp8-e5m2"},
    Named<KeyValue<Fp8Tensor<>, Fp8Tensor<>>>{"fp8-tensor"},
    Named<KeyValue<Centered<Fp8<>>, Fp8<>>>{"fp8+centered"},
    Named<KeyValue<Nvfp4, Nvfp4>>{"nvfp4"},
    Named<KeyValue<Centered<Nvfp4>, Nvfp4>>{"nvfp4+centered"},
    Named<KeyValue<Rotated<Centered<Nvfp4>>, Rotated<Nvfp4>>>{"nvfp4+centered+rotated/nvfp4+rotated"},
    Named<Mxfp4>{"mxfp4"}};

}  // namespace

Family float_family() { return family_of<quantizers>(); }

}  // namespace kvfolia_examples
