// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Strided [token][head][dim] arguments of kernels, their element type known at run time.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"

namespace kvfolia::inline KVF_ABI {

enum class DType : std::uint8_t { fp32, fp16, bf16 };

template <class T>
inline constexpr bool is_element = false;
template <>
inline constexpr bool is_element<float> = true;
template <>
inline constexpr bool is_element<fp16> = true;
template <>
inline constexpr bool is_element<bf16> = true;

template <class T>
requires is_element<T>
inline constexpr DType dtype_of = DType::bf16;
template <>
inline constexpr DType dtype_of<float> = DType::fp32;
template <>
inline constexpr DType dtype_of<fp16> = DType::fp16;

/// Calls f with a value of the element type that `type` names.
template <class F>
KVF_INLINE KVF_HD decltype(auto) visit_dtype(DType type, F&& f) {
  if (type == DType::fp32) return f(float{});
  if (type == DType::fp16) return f(fp16{});
  return f(bf16{});
}

/// Read-only [token][head][dim]; dims are contiguous, strides are in elements.
struct ConstTensor {
  const void* data = nullptr;
  DType type = DType::fp32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  ConstTensor() = default;
  template <class T>
  requires is_element<T> KVF_INLINE ConstTensor(const T* d, std::int64_t token, std::int64_t head)
      : data(d), type(dtype_of<T>), token_stride(token), head_stride(head) {}

  KVF_HD std::int64_t offset(std::int64_t token, int head) const {
    return token * token_stride + head * head_stride;
  }
};

/// Writable [token][head][dim]; dims are contiguous, strides are in elements.
struct Tensor {
  void* data = nullptr;
  DType type = DType::fp32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  Tensor() = default;
  template <class T>
  requires is_element<T> Tensor(T* d, std::int64_t token, std::int64_t head)
      : data(d), type(dtype_of<T>), token_stride(token), head_stride(head) {}

  operator ConstTensor() const {
    ConstTensor t;
    t.data = data;
    t.type = type;
    t.token_stride = token_stride;
    t.head_stride = head_stride;
    return t;
  }
  KVF_HD std::int64_t offset(std::int64_t token, int head) const {
    return token * token_stride + head * head_stride;
  }
};

/// Widens dims [0, dims) of one token and head to float.
KVF_INLINE KVF_HD void load_row(const ConstTensor& from, std::int64_t token, int head, int dims, float* to) {
  visit_dtype(from.type, [&](auto element) {
    const auto* row = static_cast<const decltype(element)*>(from.data) + from.offset(token, head);
    for (int d = 0; d < dims; ++d) to[d] = static_cast<float>(row[d]);
  });
}

/// Rounds dims [0, dims) of one token and head to the tensor's element type.
KVF_INLINE KVF_HD void store_row(const float* from, const Tensor& to, std::int64_t token, int head,
                                 int dims) {
  visit_dtype(to.type, [&](auto element) {
    using T = decltype(element);
    T* row = static_cast<T*>(to.data) + to.offset(token, head);
    for (int d = 0; d < dims; ++d) row[d] = static_cast<T>(from[d]);
  });
}

}  // namespace kvfolia::inline KVF_ABI
