// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Writing new tokens' keys and values into their pages.

#include <cmath>
#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

namespace detail {

using kvfolia::detail::bad_argument;

inline bool all_finite(const ConstTensor& tensor, std::int64_t token, int heads, int dims, float* row) {
  for (int head = 0; head < heads; ++head) {
    load_row(tensor, token, head, dims, row);
    for (int d = 0; d < dims; ++d)
      if (!std::isfinite(row[d])) return false;
  }
  return true;
}

/// Everything append() could be given wrongly; afterwards it cannot fail.
template <class Layout, class Quant>
Result<> check_append(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args) {
  if (auto ok = validate(view); !ok) return ok;
  if (batch.rows < 0) return bad_argument("batch.rows", batch.rows);
  const std::int32_t tokens = batch.total_queries();
  if (tokens == 0) return {};
  if (!batch.slots) return bad_argument("batch.slots");
  if (!args.keys.data) return bad_argument("args.keys");
  if (!Layout::shares_key_value && !args.values.data) return bad_argument("args.values");
  for (std::int32_t token = 0; token < tokens; ++token) {
    const PhysSlot slot{batch.slots[token]};
    if (slot.absent()) continue;
    const std::int64_t raw_entry = slot.raw / view.page_tokens;
    if (raw_entry > INT32_MAX) return bad_argument("batch.slots", slot.raw);
    const TableEntry entry = slot.entry(view.page_tokens);
    if (entry.format() >= view.formats_count)
      return bad_argument("batch.slots (format)", entry.format(), view.formats_count);
    if (entry.page().value >= view.formats[entry.format()].pages)
      return bad_argument("batch.slots (page)", entry.page().value, view.formats[entry.format()].pages);
  }
  if constexpr (is_checked) {
    float row[Layout::key_dim > Layout::value_dim ? Layout::key_dim : Layout::value_dim];
    for (std::int32_t token = 0; token < tokens; ++token)
      if (batch.slots[token] >= 0 &&
          !(all_finite(args.keys, token, view.kv_heads, Layout::key_dim, row) &&
            (Layout::shares_key_value ||
             all_finite(args.values, token, view.kv_heads, Layout::value_dim, row))))
        return Error{Errc::non_finite_input, "args.keys or args.values", token, 0};
  }
  return {};
}

}  // namespace detail

/// Encodes the batch's new tokens into the slots that `batch.slots` names; -1 is skipped. Writes
/// nothing when it returns an error. The batch's copies must have been carried out.
template <class Layout, class Quant, class Exec>
Result<> append(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                Exec&& exec) noexcept {
  if (Quant::seal_tokens != 1) return Error{Errc::unsupported, "Quant::seal_tokens", Quant::seal_tokens, 1};
  if (auto ok = detail::check_append(view, batch, args); !ok) return ok;
  exec.parallel_for(batch.total_queries(), [&](std::int64_t token, int) {
    const PhysSlot where{batch.slots[token]};
    if (where.absent()) return;
    const TableEntry entry = where.entry(view.page_tokens);
    const int slot = where.slot(view.page_tokens);
    float row[Layout::key_dim > Layout::value_dim ? Layout::key_dim : Layout::value_dim];
    visit_format(view, entry, [&](const auto& quant) {
      for (int head = 0; head < view.kv_heads; ++head) {
        load_row(args.keys, token, head, Layout::key_dim, row);
        quant.encode(view.key_tile(entry, head), slot, 1, row);
        if constexpr (!Layout::shares_key_value) {
          load_row(args.values, token, head, Layout::value_dim, row);
          quant.encode(view.value_tile(entry, head), slot, 1, row);
        }
      }
    });
  });
  return {};
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
