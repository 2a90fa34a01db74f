// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Writing pages: new tokens into their slots, and pages that change their format. The bodies of the kernels.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/append_checks.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/page_writer.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda {
namespace detail {

/// Called by all of a warp, which reads it once.
template <class Ctx>
KVF_INLINE KVF_HD PageRecode load_recode(Ctx& ctx, const PageRecode* from) {
  static_assert(sizeof(PageRecode) == 5 * sizeof(std::int32_t));
  std::int32_t field = 0;
  if (ctx.lane() < 5) field = ctx.load(reinterpret_cast<const std::int32_t*>(from) + ctx.lane());
  return {
      {ctx.shfl(field, 0)}, {ctx.shfl(field, 1)}, ctx.shfl(field, 2), ctx.shfl(field, 3), ctx.shfl(field, 4)};
}

/// Calls f(Share, whether it is the second side) with the share of this block.
template <class Ctx, class F, class... S>
KVF_INLINE KVF_HD void with_share(Ctx& ctx, TypeList<S...>, const F& f) {
  int number = ctx.block_z();
  const auto count = [&](auto share) {
    if (0 <= number && number < decltype(share)::sides) f(share, number == 1);
    number -= decltype(share)::sides;
  };
  (count(S()), ...);
}

}  // namespace detail

/// How much append() is given, as far as the host must know.
struct AppendConfig {
  std::int32_t tokens = 0;  ///< slots in batch.slots; those that are none of the batch are -1
};

/// Whether append() can do it: in slot-major order, an even number of dims, and every quantizer but blocks of
/// tokens of one's own.
template <class Layout, class Quant>
constexpr bool append_supported() {
  if constexpr (!std::is_same_v<typename Layout::KeyOrder, SlotMajor> ||
                !std::is_same_v<typename Layout::ValueOrder, SlotMajor>)
    return false;
  else
    return detail::writes_all(detail::Shares<Layout, Quant, detail::WriteKind::recodes>()) &&
           (format_count<Quant> == 1 ||
            (detail::reads_keys<Layout, Quant>() && detail::reads_values<Layout, Quant>()));
}

/// New tokens of formats that are coded token by token: a block has up to 32 tokens (x) of a head (y).
template <class Ctx, class Layout, class Quant>
KVF_HD void write_tokens(Ctx& ctx, const detail::WriteArgs<Layout, Quant>& args) {
  using namespace detail;
  with_share(ctx, Shares<Layout, Quant, WriteKind::tokens>(), [&](auto share, bool second) {
    using Share = decltype(share);
    const PageWriter<Ctx, Layout, Quant, Share> writer(ctx, args, second);
    constexpr int rows = Share::Part::Shape::rows;
    // Shares of more rows than the grid counts with leave some blocks nothing to do.
    const std::int64_t first = std::int64_t{ctx.block_x()} * rows;
    if (first >= args.tokens) return;
    if (ctx.thread() < rows) {
      Place place{-1, 0};
      const std::int64_t token = first + ctx.thread();
      if (token < args.tokens) {
        const PhysSlot slot{ctx.load(args.slots + token)};
        if (!slot.absent()) {
          const TableEntry entry = slot.entry(args.view.page_tokens);
          KVF_ASSERT(entry.format() < format_count<Quant>);
          if (entry.format() == Share::format) place = {entry.raw, slot.slot(args.view.page_tokens)};
        }
      }
      writer.set_place(ctx.thread(), place);
    }
    ctx.sync();
    static_assert(rows <= warp_size);
    if (!ctx.any(ctx.lane() < rows && writer.has(ctx.lane()))) return;  // of another format, or nowhere
    writer.load_tokens(first, 0);
    ctx.sync();
    writer.write({});
  });
}

/// Pages that change their format, or that are coded as a whole: a block has a head (y) of one recode (x).
template <class Ctx, class Layout, class Quant>
KVF_HD void write_recodes(Ctx& ctx, const detail::WriteArgs<Layout, Quant>& args) {
  using namespace detail;
  const PageRecode job = load_recode(ctx, args.recodes + ctx.block_x());
  if (job.to.absent()) return;
  with_share(ctx, Shares<Layout, Quant, WriteKind::recodes>(), [&](auto share, bool second) {
    using Share = decltype(share);
    if (job.to.format() != Share::format) return;
    const PageWriter<Ctx, Layout, Quant, Share> writer(ctx, args, second);
    constexpr int rows = Share::Part::Shape::rows;
    const int filled = job.kept + job.new_tokens;
    for (int first = 0; first < filled; first += rows) {
      const int count = filled - first < rows ? filled - first : rows;
      const int left = job.kept - first;
      const int kept = left < 0 ? 0 : left < count ? left : count;
      if (ctx.thread() < rows)
        writer.set_place(ctx.thread(), {ctx.thread() < count ? job.to.raw : -1, first + ctx.thread()});
      ctx.sync();
      if (kept > 0) writer.load_page(job.from, first, kept);
      if (kept < count) writer.load_tokens(std::int64_t{job.first_token} + first + kept - job.kept, kept);
      ctx.sync();
      writer.round(count);
      ctx.sync();
      writer.write({job.to.raw, first});
      ctx.sync();
    }
  });
}

}  // namespace kvfolia::inline KVF_ABI::cuda
