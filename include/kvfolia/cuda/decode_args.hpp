// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What decode and merge kernels are launched with: a view, a batch and arguments, all of whose arrays the
// device reads.

#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/paged_view.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;
KVF_INLINE KVF_HD constexpr float minus_infinity() { return -__builtin_huge_valf(); }

/// Results of splits, [query token][query head][pass][split]: keys of one format are read in one pass.
struct Partials {
  float* out;  ///< [...][value_dim], divided by the sum of weights
  float* lse;  ///< [...]
  int passes;
  int splits;  ///< of the longest row

  KVF_INLINE KVF_HD std::int64_t at(std::int64_t token, int heads, int head, int pass, int split) const {
    return ((token * heads + head) * passes + pass) * splits + split;
  }
};

/// Passes over a row's keys, and the format that each reads. Pages that are not coded are the first one's.
template <class Quant>
inline constexpr int pass_count = is_mixed<Quant> ? 2 : 1;
template <class Quant>
KVF_INLINE KVF_HD constexpr int pass_format(int pass) {
  return pass == 0 ? coded_format : low_format<Quant>;
}

template <class Layout, class Quant>
struct DecodeArgs {
  PagedView<Layout, Quant> view;
  BatchView batch;
  AttendArgs args;
  Partials partials;
  int query_heads;
  int split_tokens;
  int blocks_of_8;    ///< that share a row's columns of a KV head
  int blocks_of_16;   ///< the same of rows of more columns; 0: those are not apart
  float scale;        ///< of products of queries and keys, to base e
  float inverse_cap;  ///< 1 / soft_cap, where there is one
};

/// A row of the batch, as far as a block needs it.
struct DecodeRow {
  std::int32_t first_query;  ///< packed
  std::int32_t queries;
  std::int32_t position;     ///< of the first query
  std::int32_t length;       ///< table slots, those in use and those in front of them
  std::int64_t first_entry;  ///< in the table
};

/// Reads row and table through the context.
template <class Ctx>
KVF_INLINE KVF_HD DecodeRow read_row(Ctx& ctx, const BatchView& batch, int row, int head, int page_tokens) {
  DecodeRow r{row, 1, 0, 0, 0};
  if (batch.query_indptr) {
    r.first_query = ctx.load(batch.query_indptr + row);
    r.queries = ctx.load(batch.query_indptr + row + 1) - r.first_query;
  }
  std::int32_t entries = 0;
  if (batch.table.indptr) {
    r.first_entry = ctx.load(batch.table.indptr + row);
    entries = ctx.load(batch.table.indptr + row + 1) - static_cast<std::int32_t>(r.first_entry);
  } else {
    r.first_entry = row * batch.table.row_stride;
  }
  std::int32_t used = 0;
  if (batch.lengths) {
    used = ctx.load(batch.lengths + row);
  } else if (entries > 0) {
    const std::int32_t last = ctx.load(batch.last_page_tokens + row);
    used = (entries - 1) * page_tokens + (last < page_tokens ? last : page_tokens);
  }
  // No length leads beyond its table.
  if (batch.table.indptr && used > entries * page_tokens) used = entries * page_tokens;
  // Entries that tell how full they are may be followed by others, however full.
  r.length = batch.entry_tokens ? entries * page_tokens : used;
  r.position = batch.query_pos ? ctx.load(batch.query_pos + row) : used - r.queries;
  r.first_entry += head * batch.table.head_stride;
  return r;
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
