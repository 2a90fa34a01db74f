// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Writing new tokens' keys and values into their pages.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/arrange.hpp"
#include "kvfolia/cpu/encode.hpp"
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

/// Whether a format's pages are coded as a whole: no token is written on its own.
template <class Quant>
bool seals(int format) {
  if constexpr (1 < format_count<Quant>)
    if (format == 1) return FormatQuant<1, Quant>::seal_tokens > 1;
  if constexpr (2 < format_count<Quant>)
    if (format == 2) return FormatQuant<2, Quant>::seal_tokens > 1;
  return FormatQuant<0, Quant>::seal_tokens > 1;
}

template <class Layout, class Quant>
Result<> check_entry(const PagedView<Layout, Quant>& view, TableEntry entry, const char* format,
                     const char* page) {
  if (entry.absent()) return bad_argument(page, entry.raw, 0);
  if (entry.format() >= view.formats_count) return bad_argument(format, entry.format(), view.formats_count);
  const std::int32_t pages = view.formats[entry.format()].pages;
  return entry.page().value < pages ? Result<>() : bad_argument(page, entry.page().value, pages);
}

/// Every token of a page that is coded as a whole must come through exactly one recode; those that take
/// tokens stand in the tokens' order.
template <class Layout, class Quant>
Result<> check_recodes(const PagedView<Layout, Quant>& view, const BatchView& batch) {
  if (batch.recode_count < 0 || (batch.recode_count > 0 && !batch.recodes))
    return bad_argument("batch.recodes", batch.recode_count, 0);
  std::int64_t through_recodes = 0;
  std::int32_t next_token = 0;
  for (std::int32_t i = 0; i < batch.recode_count; ++i) {
    const PageRecode& job = batch.recodes[i];
    if (job.to.absent()) continue;
    if (auto ok = check_entry(view, job.to, "batch.recodes.to (format)", "batch.recodes.to (page)"); !ok)
      return ok;
    if (job.kept != 0)
      if (auto ok = check_entry(view, job.from, "batch.recodes.from (format)", "batch.recodes.from (page)");
          !ok)
        return ok;
    const std::int64_t filled = std::int64_t{job.kept} + job.new_tokens;
    const bool whole = !seals<Quant>(job.to.format()) || filled == view.page_tokens;
    if (job.kept < 0 || job.new_tokens < 0 || filled > view.page_tokens || !whole)
      return bad_argument("batch.recodes.kept", filled, view.page_tokens);
    if (job.kept != 0 && job.from == job.to) return bad_argument("batch.recodes.from (is to)", i);
    if (job.new_tokens == 0) continue;
    if (job.first_token < next_token ||
        job.first_token + std::int64_t{job.new_tokens} > batch.total_queries())
      return bad_argument("batch.recodes.first_token", job.first_token, next_token);
    next_token = job.first_token + job.new_tokens;
    for (std::int32_t t = 0; t < job.new_tokens; ++t)
      if (batch.slots[job.first_token + t] != PhysSlot::make(job.to, job.kept + t, view.page_tokens).raw)
        return bad_argument("batch.recodes (other tokens have the page's slots)", job.first_token + t);
    if (seals<Quant>(job.to.format())) through_recodes += job.new_tokens;
  }
  for (std::int32_t token = 0; token < batch.total_queries(); ++token) {
    const PhysSlot slot{batch.slots[token]};
    if (!slot.absent() && seals<Quant>(slot.entry(view.page_tokens).format())) --through_recodes;
  }
  return through_recodes == 0
             ? Result<>()
             : bad_argument("batch.recodes (pages coded as a whole come through them)", through_recodes, 0);
}

/// What append() could be given wrongly, but recodes that name a page twice; afterwards it cannot fail.
template <class Layout, class Quant>
Result<> check_append(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args) {
  if (auto ok = validate(view); !ok) return ok;
  if (batch.rows < 0) return bad_argument("batch.rows", batch.rows);
  const std::int32_t tokens = batch.total_queries();
  if (tokens > 0) {
    if (!batch.slots) return bad_argument("batch.slots");
    if (!args.keys.data) return bad_argument("args.keys");
    if (!Layout::shares_key_value && !args.values.data) return bad_argument("args.values");
  }
  for (std::int32_t token = 0; token < tokens; ++token) {
    const PhysSlot slot{batch.slots[token]};
    if (slot.absent()) continue;
    const std::int64_t raw_entry = slot.raw / view.page_tokens;
    if (raw_entry > INT32_MAX) return bad_argument("batch.slots", slot.raw);
    if (auto ok =
            check_entry(view, slot.entry(view.page_tokens), "batch.slots (format)", "batch.slots (page)");
        !ok)
      return ok;
  }
  if (auto ok = check_recodes(view, batch); !ok) return ok;
  if (auto ok = kvfolia::detail::validate(args.rope, Layout::key_dim); !ok) return ok;
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

/// Tokens that are encoded together where their slots follow one another.
inline constexpr int run_tokens = 16;

/// New tokens' keys, or values: rows of a tensor, with a rotary embedding where there is one.
struct NewRows {
  const ConstTensor& rows;
  const Rope& rope;

  void load(std::int64_t token, int head, int dims, float* to) const {
    load_row(rows, token, head, dims, to);
    if (rope.cos_sin) turn(rope, token, to + rope.first_dim);
  }

 private:
  /// Not inlined: the loops that load rows would become several times as long.
  [[gnu::noinline]] static void turn(const Rope& rope, std::int64_t token, float* first) {
    const int pairs = rope.dims / 2;
    const float* cosines = rope.cos_sin + std::int64_t{rope.positions[token]} * rope.dims;
    for (int i = 0; i < pairs; ++i) {
      float& x = first[rope.interleaved ? 2 * i : i];
      float& y = first[rope.interleaved ? 2 * i + 1 : pairs + i];
      const float turned = Rope::turn(x, cosines[i], -y, cosines[pairs + i]);
      y = Rope::turn(y, cosines[i], x, cosines[pairs + i]);
      x = turned;
    }
  }
};

/// `count` tokens of one head, to slots that follow one another, where pages are coded token by token.
template <int Dims, class Q, class Order>
void append_run(const Q& quant, const Tile<Order, std::byte>& to, int slot, const NewRows& from,
                std::int64_t token, int head, int count) {
  if constexpr (Q::seal_tokens == 1 && encodes_rows<Q> && arranges<Order, Q::code_bits>) {
    // Rows that are turned come one by one, by way of this one.
    const bool turns = from.rope.cos_sin != nullptr;
    const int tokens = turns ? 1 : count;
    float turned[Dims];
    for (int t = 0; t < count; t += tokens) {
      if (turns) from.load(token + t, head, Dims, turned);
      const ConstTensor rows = turns ? ConstTensor(turned, Dims, 0) : from.rows;
      visit_dtype(rows.type, [&](auto element) {
        const auto* first =
            static_cast<const decltype(element)*>(rows.data) + (turns ? 0 : rows.offset(token, head));
        if constexpr (std::is_same_v<Order, SlotMajor>) {
          encode_rows<Dims>(quant, to, slot + t, first, rows.token_stride, tokens);
        } else {
          // Parameters go where they belong, codes through a tile of their own.
          constexpr int bytes = code_bytes<Q>(Dims);
          alignas(64) std::byte codes[run_tokens * bytes];
          const Tile<SlotMajor, std::byte> staged{
              codes, to.params + (slot + t) * to.param_stride, Dims, run_tokens, bytes, to.param_stride};
          encode_rows<Dims>(quant, staged, 0, first, rows.token_stride, tokens);
          arrange<Q::code_bits, bytes>(Order{}, codes, to.codes, slot + t, tokens, to.page_tokens);
        }
      });
    }
  } else if constexpr (Q::seal_tokens == 1) {
    float row[Dims];
    for (int t = 0; t < count; ++t) {
      from.load(token + t, head, Dims, row);
      to_stored(quant, row, Dims);
      quant.encode(to, slot + t, 1, Rows{row, Dims});
    }
  }
}

/// Exact tokens on their way into a page.
template <class Code>
struct ExactRows {
  const Code* data;
  int dims;
  float operator()(int token, int dim) const { return static_cast<float>(data[token * dims + dim]); }
};

/// One head of one plane of a recode. Values are rounded as an exact page would hold them, whether they
/// lay in one or not: so a coded page's bytes do not depend on how its tokens arrived.
template <int Dims, class Q, class Exact, class ToTile, class Decode>
void recode_plane(const Q& quant, const Exact& exact, const ToTile& to, const PageRecode& job,
                  const NewRows& rows, int head, Decode&& decode_kept) {
  using Code = typename Exact::Code;
  constexpr int block = Q::seal_tokens;
  Code codes[block * Dims];
  float row[Dims];
  const std::int32_t filled = job.kept + job.new_tokens;
  for (std::int32_t first = 0; first < filled; first += block) {
    for (int t = 0; t < block; ++t) {
      const std::int32_t slot = first + t;
      if (slot < job.kept) {
        decode_kept(slot, row);
      } else {
        rows.load(job.first_token + slot - job.kept, head, Dims, row);
        to_stored(exact, row, Dims);
      }
      for (int d = 0; d < Dims; ++d) codes[t * Dims + d] = Exact::round(row[d]);
    }
    quant.encode(to, first, block, ExactRows<Code>{codes, Dims});
  }
}

template <class Layout, class Quant>
void recode(const PagedView<Layout, Quant>& view, const AppendArgs& args, const PageRecode& job, int head) {
  using Exact = typename Quant::Exact;
  if (job.to.absent()) return;
  visit_format(view, job.to, [&](const auto& to) {
    recode_plane<Layout::key_dim>(key_side(to), KeySide<Exact>{}, view.key_tile(job.to, head), job,
                                  NewRows{args.keys, args.rope}, head, [&](int slot, float* row) {
                                    visit_format(view, job.from, [&](const auto& from) {
                                      key_side(from).decode(view.key_tile(job.from, head), slot, row);
                                    });
                                  });
    if constexpr (!Layout::shares_key_value)
      recode_plane<Layout::value_dim>(value_side(to), ValueSide<Exact>{}, view.value_tile(job.to, head), job,
                                      NewRows{args.values, Rope{}}, head, [&](int slot, float* row) {
                                        visit_format(view, job.from, [&](const auto& from) {
                                          value_side(from).decode(view.value_tile(job.from, head), slot, row);
                                        });
                                      });
  });
}

/// How many tokens from `token` on lie in slots that follow one another, up to `end` and the next multiple
/// of run_tokens: so most runs are whole, and begin where cache lines do.
inline int run_length(const BatchView& batch, std::int32_t token, std::int32_t end, int page_tokens) {
  const PhysSlot first{batch.slots[token]};
  const int slot = first.slot(page_tokens);
  const int most = std::min({run_tokens - slot % run_tokens, page_tokens - slot, end - token});
  int count = 1;
  while (count < most && batch.slots[token + count] == first.raw + count) ++count;
  return count;
}

/// The tokens [begin, end), all heads.
template <class Layout, class Quant>
void append_tokens(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                   std::int32_t begin, std::int32_t end) {
  for (std::int32_t token = begin, count = 1; token < end; token += count) {
    count = 1;
    const PhysSlot where{batch.slots[token]};
    if (where.absent()) continue;
    count = run_length(batch, token, end, view.page_tokens);
    const TableEntry entry = where.entry(view.page_tokens);
    if (seals<Quant>(entry.format())) continue;
    const int slot = where.slot(view.page_tokens);
    visit_format(view, entry, [&](const auto& quant) {
      for (int head = 0; head < view.kv_heads; ++head) {
        append_run<Layout::key_dim>(key_side(quant), view.key_tile(entry, head), slot,
                                    NewRows{args.keys, args.rope}, token, head, count);
        if constexpr (!Layout::shares_key_value)
          append_run<Layout::value_dim>(value_side(quant), view.value_tile(entry, head), slot,
                                        NewRows{args.values, Rope{}}, token, head, count);
      }
    });
  }
}

}  // namespace detail

/// Encodes the batch's new tokens into the slots that `batch.slots` names; -1 is skipped. Pages that
/// change their format do so now, with or without new tokens: sealed, opened and demoted ones. Writes
/// nothing when it returns an error. The batch's copies must have been carried out.
template <class Layout, class Quant, class Exec>
Result<> append(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                Exec&& exec) noexcept {
  if (auto ok = detail::check_append(view, batch, args); !ok) return ok;
  // First: another sequence's new tokens may overwrite what is kept.
  exec.parallel_for(std::int64_t{batch.recode_count} * view.kv_heads, [&](std::int64_t i, int) {
    detail::recode(view, args, batch.recodes[i / view.kv_heads], static_cast<int>(i % view.kv_heads));
  });
  // Every thread gets tokens at once, and no more at a time than a few pages': some are slower than others.
  const std::int32_t tokens = batch.total_queries();
  const std::int32_t threads = std::max(1, static_cast<int>(exec.concurrency()));
  const std::int32_t share = tokens / threads + (tokens % threads != 0 ? 1 : 0);
  const std::int32_t chunk = std::clamp(share, 1, 64);
  exec.parallel_for((std::int64_t{tokens} + chunk - 1) / chunk, [&](std::int64_t i, int) {
    const std::int64_t begin = i * chunk, end = std::min<std::int64_t>(begin + chunk, tokens);
    detail::append_tokens(view, batch, args, static_cast<std::int32_t>(begin),
                          static_cast<std::int32_t>(end));
  });
  return {};
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
