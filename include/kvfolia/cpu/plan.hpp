// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Deciding, once a step, who computes which part of attention.

#include <cstdint>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/amx.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/fast_scratch.hpp"
#include "kvfolia/cpu/plain_attend.hpp"
#include "kvfolia/cpu/planner.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// How the fast path reads pages for rows with few queries.
enum class AttendKernel : std::uint8_t {
  none,      ///< attend() refuses
  plain,     ///< the plain path takes its place: no vectors of a known size
  decoding,  ///< some keys or values are decoded to floats first
  streaming  ///< all codes are read where they lie
};

/// Whether attend() can do it, and how well: the same answer at compile time and at run time.
template <class Layout, class Quant>
constexpr AttendKernel supported(int query_heads, int kv_heads) {
  if (!(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0)) return AttendKernel::none;
  if (!has_vectors) return AttendKernel::plain;
  return detail::FormatFacts<Layout, Quant>::streams ? AttendKernel::streaming : AttendKernel::decoding;
}

/// Whether the fast path rounds what it multiplies to less than a float has, for rows with so many queries.
/// Rows with few have theirs rounded to 15 bits where 8-bit dot products serve 8-bit and 4-bit keys: about a
/// thousandth of what those keys' own rounding costs. Where they serve 8-bit values, in the order
/// SlotPairs<4> only, a tile's probabilities are rounded to 1/16256 of the largest one: a thousand small ones
/// may vanish. Rows with many have all rounded to 16 bits on AMX.
template <class Layout, class Quant>
constexpr bool rounds_operands(std::int32_t queries) {
  if (queries > detail::streaming_queries) return detail::FormatFacts<Layout, Quant>::uses_amx;
  return has_vectors && detail::FormatFacts<Layout, Quant>::rounds;
}

namespace detail {

/// Floats of a worker's scratch, and of a state.
template <class Layout, class Quant>
constexpr std::int64_t scratch_floats(const AttendPlan& plan) {
  if (plan.config.path == AttendPath::plain) return PlainScratch<Layout, Quant>{plan.scratch_rows}.size();
  return FastScratch<Layout, Quant>(round_up<std::int64_t>(plan.scratch_rows, amx_tile)).size();
}
template <class Layout, class Quant>
void size_scratch(AttendPlan& plan) {
  plan.scratch_floats = scratch_floats<Layout, Quant>(plan);
  plan.state_floats = plan.config.path == AttendPath::plain ? PlainScratch<Layout, Quant>::state_floats
                                                            : FastScratch<Layout, Quant>::state_floats();
}

}  // namespace detail

/// Checks view and batch and plans attend() for all layers of this shape. Reads tables and lengths
/// only; keeps no pointer. Throws nothing but std::bad_alloc.
template <class Layout, class Quant>
Result<AttendPlan> plan_attend(const PagedView<Layout, Quant>& view, const BatchView& batch,
                               const AttendConfig& config) {
  if (auto ok = validate(view, batch); !ok) return ok.error();
  if (supported<Layout, Quant>(config.query_heads, view.kv_heads) == AttendKernel::none)
    return Error{Errc::unsupported, "config.query_heads", config.query_heads, view.kv_heads};
  if (config.concurrency < 1)
    return kvfolia::detail::bad_argument("config.concurrency", config.concurrency, 1);

  AttendPlan plan;
  plan.config = config;
  if (!has_vectors) plan.config.path = AttendPath::plain;
  plan.amx = plan.config.path == AttendPath::fast && detail::permits_amx();
  plan.kv_heads = view.kv_heads;
  plan.page_tokens = view.page_tokens;
  plan.key_dim = Layout::key_dim;
  plan.value_dim = Layout::value_dim;
  for (int row = 0; row < batch.rows; ++row)
    plan.rows.push_back(detail::plan_row(batch, row, view.kv_heads, view.page_tokens));
  detail::Planner(plan, batch, view.window).run();
  detail::size_scratch<Layout, Quant>(plan);
  return plan;
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
