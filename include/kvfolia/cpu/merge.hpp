// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Putting partial results of attention together and finishing them.

#include <math.h>

#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// Merges `other` into `out` and `lse`. Merging two results without keys gives 0 and -infinity.
template <class Exec>
Result<> merge(const MergeArgs& args, Exec&& exec) noexcept {
  using kvfolia::detail::bad_argument;
  if (args.tokens < 0 || args.query_heads < 0) return bad_argument("args.tokens", args.tokens);
  if (args.tokens == 0 || args.query_heads == 0) return {};
  if (!args.out.data || args.out.type != DType::fp32) return bad_argument("args.out (must be float)");
  if (!args.other_out.data || args.other_out.type != DType::fp32)
    return bad_argument("args.other_out (must be float)");
  if (!args.lse.data) return bad_argument("args.lse");
  if (!args.other_lse.data) return bad_argument("args.other_lse");
  exec.parallel_for(args.tokens, [&](std::int64_t token, int) {
    for (int head = 0; head < args.query_heads; ++head) {
      const auto [old_part, new_part] = merge_lse(args.lse.at(token, head), args.other_lse.at(token, head));
      float* to = static_cast<float*>(args.out.data) + args.out.offset(token, head);
      const float* from = static_cast<const float*>(args.other_out.data) + args.other_out.offset(token, head);
      for (int d = 0; d < args.value_dim; ++d) to[d] = ::fmaf(from[d], new_part, to[d] * old_part);
    }
  });
  return {};
}

/// Adds the sink logit, which partial results leave out, and rounds to out's element type.
template <class Exec>
Result<> finish(const FinishArgs& args, Exec&& exec) noexcept {
  using kvfolia::detail::bad_argument;
  if (args.tokens < 0 || args.query_heads < 0) return bad_argument("args.tokens", args.tokens);
  if (args.tokens == 0 || args.query_heads == 0) return {};
  if (!args.partial_out.data || args.partial_out.type != DType::fp32)
    return bad_argument("args.partial_out (must be float)");
  if (!args.out.data) return bad_argument("args.out");
  if (args.sink_logits && !args.partial_lse.data) return bad_argument("args.partial_lse");
  exec.parallel_for(args.tokens, [&](std::int64_t token, int) {
    for (int head = 0; head < args.query_heads; ++head) {
      float weight = 1.0f;
      NaturalLse lse{kvfolia::detail::negative_infinity};
      if (args.partial_lse.data) lse = args.partial_lse.at(token, head);
      if (args.sink_logits) weight = merge_lse(lse, {args.sink_logits[head]}).old_part;
      if (args.lse.data) args.lse.at(token, head) = lse;
      const float* from =
          static_cast<const float*>(args.partial_out.data) + args.partial_out.offset(token, head);
      visit_dtype(args.out.type, [&](auto element) {
        using T = decltype(element);
        T* to = static_cast<T*>(args.out.data) + args.out.offset(token, head);
        for (int d = 0; d < args.value_dim; ++d) to[d] = static_cast<T>(from[d] * weight);
      });
    }
  });
  return {};
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
