// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Caches of floating-point numbers, and int8's: those that exist in every element order.

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

/// Dim-major keys, as many elements side by side as 32 bits hold: what the fast path reads best.
template <class Quant>
std::unique_ptr<KvCache> with_order(const KvShape& shape, const KvOptions& options) {
  const auto with_dim = [&](auto dim) {
    constexpr int head_dim = decltype(dim)::value;
    constexpr int x = 32 / Quant::code_bits;
    if (options.order == ElementOrderName::dim)
      return with_evict<Gqa<head_dim, dynamic, DimMajor<x>>, Quant>(shape, options);
    return with_evict<Gqa<head_dim, dynamic>, Quant>(shape, options);
  };
  if (shape.head_dim == 64) return with_dim(std::integral_constant<int, 64>());
  if (shape.head_dim == 128) return with_dim(std::integral_constant<int, 128>());
  refuse_head_dim(shape.head_dim, "64 and 128 are");
}

std::unique_ptr<KvCache> make(const KvShape& shape, const KvOptions& options) {
  const std::string parts = options.policy.parts();
  if (options.policy.mixed) return nullptr;
  if (parts == "fp32") return with_order<Identity<float>>(shape, options);
  if (parts == "fp16") return with_order<Identity<fp16>>(shape, options);
  if (parts == "bf16") return with_order<Identity<bf16>>(shape, options);
  if (parts == "int8") return with_order<Int8>(shape, options);
  return nullptr;
}

}  // namespace

Family exact_family() { return {{"fp32", "fp16", "bf16", "int8"}, make}; }

}  // namespace kvfolia_examples
