// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What the host can see that append() is given wrongly.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/append_args.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

template <class Share, class View>
Result<> check_planes_of(const View& view) {
  using kvfolia::detail::bad_argument;
  using kvfolia::detail::is_aligned;
  using Shape = typename Share::Part::Shape;
  const FormatView& format = view.formats[Share::format];
  if (format.pages == 0) return {};
  int unit = Shape::Codes::unit;
  if constexpr (Shape::is_exact) unit = 2 * static_cast<int>(sizeof(typename Share::Part::Quant::Code));
  const int param_unit = Shape::is_block ? 4 : Shape::param_bytes > 0 ? Shape::Params::unit : 1;
  const bool in_codes = Share::Part::first_code % unit == 0,
             in_params = Share::Part::first_param % param_unit == 0;
  if (Share::side != SideKind::values) {
    if (!is_aligned(format.keys, unit) || !in_codes)
      return bad_argument("view.formats.keys (alignment)", 0, unit);
    if (!is_aligned(format.key_params, param_unit) || !in_params)
      return bad_argument("view.formats.key_params (alignment)", 0, param_unit);
  }
  if (Share::side != SideKind::keys) {
    if (!is_aligned(format.values, unit) || !in_codes)
      return bad_argument("view.formats.values (alignment)", 0, unit);
    if (!is_aligned(format.value_params, param_unit) || !in_params)
      return bad_argument("view.formats.value_params (alignment)", 0, param_unit);
  }
  return {};
}
template <class View, class... S>
Result<> check_planes(const View& view, TypeList<S...>) {
  Result<> ok;
  static_cast<void>(((ok = check_planes_of<S>(view)) && ...));
  return ok;
}

/// Whether pages and rows begin where kernels may read and write them.
template <class Layout, class Quant>
Result<> check_write_alignment(const PagedView<Layout, Quant>& view, const AppendArgs& args) {
  using kvfolia::detail::bad_argument;
  using kvfolia::detail::is_aligned;
  const auto pairs = [](const ConstTensor& t) {
    const std::uintptr_t element = t.type == DType::fp32 ? 4 : 2;
    return reinterpret_cast<std::uintptr_t>(t.data) % (2 * element) == 0 && t.token_stride % 2 == 0 &&
           t.head_stride % 2 == 0;
  };
  if (!pairs(args.keys)) return bad_argument("args.keys (alignment: two numbers)");
  if (!Layout::shares_key_value && !pairs(args.values))
    return bad_argument("args.values (alignment: two numbers)");
  return check_planes(view, Shares<Layout, Quant, WriteKind::recodes>());
}

/// Whether some of the dims that are rotated are coded apart from others.
template <class... S>
bool is_torn(const Rope& rope, TypeList<S...>) {
  const auto torn = [&](SideKind side, int first, int end) {
    return side != SideKind::values && first <= rope.first_dim && rope.first_dim < end &&
           rope.first_dim + rope.dims > end;
  };
  return (torn(S::side, S::Part::first_dim, S::Part::first_dim + S::Part::dims) || ...);
}
template <class Layout, class Quant>
Result<> check_rope(const PagedView<Layout, Quant>&, const Rope& rope) {
  using kvfolia::detail::bad_argument;
  if (auto ok = kvfolia::detail::validate(rope, Layout::key_dim); !ok) return ok;
  if (!rope.cos_sin) return {};
  return is_torn(rope, Shares<Layout, Quant, WriteKind::recodes>())
             ? bad_argument("args.rope (dims of two sections)", rope.first_dim, rope.dims)
             : Result<>();
}

/// Everything that append() could be given wrongly and the host can see.
template <class Layout, class Quant>
Result<> check_write(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                     std::int32_t tokens) {
  using kvfolia::detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  constexpr std::int64_t most_heads = 65535;  // of a grid's second dimension
  if (view.kv_heads > most_heads) return bad_argument("view.kv_heads", view.kv_heads, most_heads);
  if (tokens < 0) return bad_argument("config.tokens", tokens);
  if (batch.recode_count < 0 || (batch.recode_count > 0 && !batch.recodes))
    return bad_argument("batch.recodes", batch.recode_count);
  if (tokens > 0) {
    if (!batch.slots) return bad_argument("batch.slots");
    if (!args.keys.data) return bad_argument("args.keys");
    if (!Layout::shares_key_value && !args.values.data) return bad_argument("args.values");
  }
  if (auto ok = check_write_alignment(view, args); !ok) return ok;
  return check_rope(view, args.rope);
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
