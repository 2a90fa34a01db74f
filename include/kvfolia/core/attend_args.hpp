// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Arguments of the kernels, the same for every backend.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/mask.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/core/tensor.hpp"

namespace kvfolia::inline KVF_ABI {

/// Rotary position embedding of dims [first_dim, first_dim + dims) of new keys, on their way into pages. Pair
/// i of a token at position p, (x, y), becomes (x cos - y sin, x sin + y cos), cosine and sine being
/// cos_sin[p][i] and cos_sin[p][dims / 2 + i]: so scaled frequencies need nothing of their own.
/// Source: RoFormer, arXiv:2104.09864, section 3.4.2.
struct Rope {
  const float* cos_sin = nullptr;           ///< [positions][dims]; null: keys are rotated already
  const std::int32_t* positions = nullptr;  ///< [query tokens]
  int first_dim = 0;                        ///< even
  int dims = 0;                             ///< even
  bool interleaved = false;                 ///< pair i is dims 2 i and 2 i + 1; else i and dims / 2 + i

  /// One number of a pair; the other one, and the sine, with their signs.
  KVF_INLINE KVF_HD static float turn(float x, float cosine, float other, float sine) {
    return __builtin_fmaf(other, sine, __builtin_fmaf(x, cosine, 0.0f));
  }
};

/// New tokens to store. Layouts that share key and value take `keys` only.
struct AppendArgs {
  ConstTensor keys{};    ///< [query tokens][kv_heads][key_dim]
  ConstTensor values{};  ///< [query tokens][kv_heads][value_dim]
  Rope rope{};
};

/// Log-sum-exps, [query tokens][query_heads].
struct LseTensor {
  NaturalLse* data = nullptr;  ///< null: not wanted
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 1;

  KVF_HD NaturalLse& at(std::int64_t token, int head) const {
    return data[token * token_stride + head * head_stride];
  }
};

/// out[t][h] = sum_j softmax_j(score_j) * value_j over the keys that query t sees, where
/// score_j = cap(scale * q.k_j) + slope_h * (j - i), cap(x) = soft_cap * tanh(x / soft_cap), i and j
/// logical positions. The sink logit joins the softmax's denominator and has no value.
struct AttendArgs {
  ConstTensor queries{};  ///< [query tokens][query_heads][key_dim]
  Tensor out{};           ///< [query tokens][query_heads][value_dim]
  LseTensor lse{};
  float scale = 0.0f;                   ///< 0: 1 / sqrt(key_dim); Mla has no default
  float soft_cap = 0.0f;                ///< 0: none
  const float* sink_logits = nullptr;   ///< [query_heads]
  const float* alibi_slopes = nullptr;  ///< [query_heads]
  bool causal = true;                   ///< query at i sees keys j <= i
  CustomMask mask{};                    ///< where given, sees only keys whose bit is set, too
  bool partial = false;  ///< leaves out the sink logit, writes float: to be merged, then finished
};

namespace detail {

/// Checks attend's arguments, without reading what they point to, for so many query tokens.
KVF_INLINE Result<> validate(const AttendArgs& args, std::int32_t tokens, int query_heads) {
  const auto fits = [&](std::int64_t token_stride, std::int64_t head_stride) KVF_INLINE_LAMBDA {
    return (tokens == 1 || token_stride != 0) && (query_heads == 1 || head_stride != 0);
  };
  if (!args.queries.data) return bad_argument("args.queries");
  if (!args.out.data) return bad_argument("args.out");
  if (!fits(args.out.token_stride, args.out.head_stride)) return bad_argument("args.out (strides)");
  if (args.lse.data && !fits(args.lse.token_stride, args.lse.head_stride))
    return bad_argument("args.lse (strides)");
  if (args.partial && args.out.type != DType::fp32)
    return bad_argument("args.out (partial results are float)");
  if (args.mask.bits && !args.mask.row_offset) return bad_argument("args.mask.row_offset");
  return {};
}

/// Checks what a rotary embedding of keys of so many dims is given.
KVF_INLINE Result<> validate(const Rope& rope, int key_dim) {
  if (!rope.cos_sin) return {};
  if (!rope.positions) return bad_argument("args.rope.positions");
  if (rope.dims <= 0 || rope.dims % 2 != 0 || rope.dims > key_dim)
    return bad_argument("args.rope.dims", rope.dims, key_dim);
  if (rope.first_dim < 0 || rope.first_dim % 2 != 0 || rope.first_dim > key_dim - rope.dims)
    return bad_argument("args.rope.first_dim", rope.first_dim, key_dim - rope.dims);
  return {};
}

/// A latent key's width is not the width of the heads that it was absorbed from.
template <class Layout>
KVF_INLINE Result<> validate_scale(const AttendArgs& args) {
  if (Layout::shares_key_value && args.scale == 0.0f) return bad_argument("args.scale (Mla has no default)");
  return {};
}

}  // namespace detail

/// Merges the partial results of two disjoint sets of keys; the first one becomes the result.
struct MergeArgs {
  std::int32_t tokens = 0;
  std::int32_t query_heads = 0;
  std::int32_t value_dim = 0;
  Tensor out{};  ///< float, as is other_out
  LseTensor lse{};
  ConstTensor other_out{};
  LseTensor other_lse{};
};

/// Turns a partial result into a final one: adds the sink logit, rounds to out's element type.
struct FinishArgs {
  std::int32_t tokens = 0;
  std::int32_t query_heads = 0;
  std::int32_t value_dim = 0;
  ConstTensor partial_out{};  ///< float
  LseTensor partial_lse{};
  Tensor out{};                        ///< may be partial_out's memory
  LseTensor lse{};                     ///< may be partial_lse's memory
  const float* sink_logits = nullptr;  ///< [query_heads]
};

}  // namespace kvfolia::inline KVF_ABI
