// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How many blocks a batch's attention takes on a GPU, and how much workspace: arithmetic on the host, on
// what an engine knows there.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Bounds of the batches that a plan serves: a graph that was captured with it may be replayed for any batch
/// within them, lengths are read on the device.
struct AttendConfig {
  int query_heads = 0;
  std::int32_t rows = 0;
  std::int32_t queries = 0;      ///< of all rows
  std::int32_t row_queries = 1;  ///< of any row, at most
  std::int32_t row_slots = 0;    ///< table slots of any row, at most: its length, or, with entry_tokens, its
                                 ///< entries times page_tokens
  int split_tokens = default_split_tokens;  ///< a multiple of 128; results depend on it
};

struct Grid {
  int x = 0;
  int y = 0;
  int z = 0;
};

/// What attend() launches. Trivially copyable; keeps no pointer. Rows of up to eight columns, query heads of
/// a group times queries, and longer ones have kernels of their own, so that a row's bits depend on itself
/// alone.
struct AttendPlan {
  AttendConfig config{};
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int passes = 1;  ///< over a row's keys: one for each coded format
  int splits = 0;  ///< of the longest row
  // Blocks that share a row's columns of a KV head, eight each, or sixteen of long rows; 0: no such rows.
  int blocks_of_8 = 0;
  int blocks_of_16 = 0;

  Grid decode_grid(std::int32_t rows, int columns) const {
    return {splits, kv_heads * (columns == 8 ? blocks_of_8 : blocks_of_16), rows};
  }
  Grid merge_grid(std::int32_t rows) const { return {config.query_heads, config.row_queries, rows}; }
  std::int64_t states() const { return std::int64_t{config.queries} * config.query_heads * passes * splits; }

  /// Exactly what attend() needs, aligned to 16 bytes.
  std::size_t workspace_bytes() const {
    return static_cast<std::size_t>(states()) * (static_cast<std::size_t>(value_dim) + 1) * sizeof(float);
  }
};

namespace detail {

/// Whether kernels read all formats of a quantizer that are coded.
template <class Layout, class Quant, int Pass = 0>
constexpr bool reads_formats() {
  if constexpr (Pass == pass_count<Quant>) {
    return true;
  } else {
    using Coded = FormatQuant<pass_format<Quant>(Pass), Quant>;
    return reads_side<KeySide<Coded>, Layout::key_dim>() &&
           reads_side<ValueSide<Coded>, Layout::value_dim>() && reads_formats<Layout, Quant, Pass + 1>();
  }
}

}  // namespace detail

/// Whether attend() can do it, at compile time: with any number of heads.
template <class Layout, class Quant>
constexpr bool supported() {
  constexpr auto has_dims = [](int dims) {
    for (const int known : {64, 80, 96, 112, 128, 192, 256})
      if (dims == known) return true;
    return false;
  };
  if constexpr (Layout::shares_key_value)
    return false;
  else if constexpr (!std::is_same_v<typename Layout::KeyOrder, SlotMajor> ||
                     !std::is_same_v<typename Layout::ValueOrder, SlotMajor>)
    return false;
  else
    return has_dims(Layout::key_dim) && has_dims(Layout::value_dim) && detail::reads_formats<Layout, Quant>();
}
/// With these numbers of heads.
template <class Layout, class Quant>
constexpr bool supported(int query_heads, int kv_heads) {
  return supported<Layout, Quant>() && kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0;
}

/// Plans attend() for all layers of this shape.
template <class Layout, class Quant>
Result<AttendPlan> plan_attend(const PagedView<Layout, Quant>& view, const AttendConfig& config) noexcept {
  using kvfolia::detail::bad_argument;
  if (!supported<Layout, Quant>(config.query_heads, view.kv_heads))
    return Error{Errc::unsupported, "config.query_heads, layout or quantizer", config.query_heads,
                 view.kv_heads};
  if (config.rows < 0) return bad_argument("config.rows", config.rows);
  if (config.queries < 0) return bad_argument("config.queries", config.queries);
  if (config.row_queries < 1) return bad_argument("config.row_queries", config.row_queries, 1);
  if (config.row_slots < 0) return bad_argument("config.row_slots", config.row_slots);
  if (config.split_tokens < 128 || config.split_tokens % 128 != 0)
    return bad_argument("config.split_tokens", config.split_tokens, 128);
  AttendPlan plan;
  plan.config = config;
  plan.kv_heads = view.kv_heads;
  plan.key_dim = Layout::key_dim;
  plan.value_dim = Layout::value_dim;
  plan.passes = detail::pass_count<Quant>;
  const std::int64_t columns = std::int64_t{config.row_queries} * (config.query_heads / view.kv_heads);
  // Sixteen columns take registers that 256 dims need themselves.
  constexpr bool has_wide = !detail::has_long_heads<Layout>;
  const std::int64_t group = config.query_heads / view.kv_heads;
  const std::int64_t blocks_of_8 = !has_wide ? (columns + 7) / 8 : group <= 8 ? 1 : 0;
  const std::int64_t blocks_of_16 = has_wide && columns > 8 ? (columns + 15) / 16 : 0;
  const std::int64_t blocks = blocks_of_8 > blocks_of_16 ? blocks_of_8 : blocks_of_16;
  plan.splits =
      static_cast<int>((std::int64_t{config.row_slots} + config.split_tokens - 1) / config.split_tokens);
  constexpr std::int64_t most_blocks = 65535;  // of a grid's second and third dimension
  if (blocks * view.kv_heads > most_blocks)
    return bad_argument("config.row_queries (blocks)", blocks * view.kv_heads, most_blocks);
  if (config.rows > most_blocks) return bad_argument("config.rows", config.rows, most_blocks);
  if (config.row_queries > most_blocks)
    return bad_argument("config.row_queries", config.row_queries, most_blocks);
  plan.blocks_of_8 = static_cast<int>(blocks_of_8);
  plan.blocks_of_16 = static_cast<int>(blocks_of_16);
  return plan;
}

namespace detail {

/// Whether there is a kernel without windows, custom masks, soft-caps and slopes: for eight columns of one
/// coded format. Beside sixteen what those cost is little.
template <class Quant, int Tiles>
inline constexpr bool has_plain_kernel = Tiles == 1 && pass_count<Quant> == 1;
/// Whether that one will do.
inline bool is_plain(const AttendArgs& args, Window window) {
  return window.left < 0 && !args.mask.bits && args.soft_cap <= 0.0f && !args.alibi_slopes;
}

template <class Side>
constexpr int param_alignment_of() {
  const int of_tokens = Side::param_bytes > 0 ? ParamShape<Side>::unit : 1;
  const int of_blocks = Side::has_channels ? largest_unit(Side::block_bytes) : 1;
  return of_tokens > of_blocks ? of_tokens : of_blocks;
}

/// Whether kernels, which multiply by strides of 32 bits, find the rows of a plane.
inline bool strides_fit(const PlaneView& plane) {
  const auto fits = [](std::int64_t stride) { return stride == static_cast<std::uint32_t>(stride); };
  return fits(plane.page_stride) && fits(plane.slot_stride);
}

/// Checks that copies of so many bytes fit the planes that kernels read, and their strides.
template <class Layout, class Quant, int Pass = 0>
Result<> check_planes(const PagedView<Layout, Quant>& view) {
  using kvfolia::detail::bad_argument;
  using kvfolia::detail::is_aligned;
  if constexpr (Pass < pass_count<Quant>) {
    constexpr int format_number = pass_format<Quant>(Pass);
    using Coded = FormatQuant<format_number, Quant>;
    using Keys = SideShape<KeySide<Coded>, Layout::key_dim, true>;
    using Values = SideShape<ValueSide<Coded>, Layout::value_dim, false>;
    const FormatView& format = view.formats[format_number];
    for (const PlaneView* plane : {&format.keys, &format.values, &format.key_params, &format.value_params})
      if (!strides_fit(*plane)) return bad_argument("view.formats (strides of 4 GiB)", plane->page_stride);
    if (!is_aligned(format.keys, Keys::unit))
      return bad_argument("view.formats.keys (alignment)", 0, Keys::unit);
    if (!is_aligned(format.values, Values::unit))
      return bad_argument("view.formats.values (alignment)", 0, Values::unit);
    constexpr int key_unit = param_alignment_of<Keys>(), value_unit = param_alignment_of<Values>();
    if (!is_aligned(format.key_params, key_unit))
      return bad_argument("view.formats.key_params (alignment)", 0, key_unit);
    if (!is_aligned(format.value_params, value_unit))
      return bad_argument("view.formats.value_params (alignment)", 0, value_unit);
    return check_planes<Layout, Quant, Pass + 1>(view);
  }
  return {};
}

/// Everything attend() could be given wrongly that the host can see.
template <class Layout, class Quant>
Result<> check_attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                      const AttendPlan& plan, std::size_t workspace_bytes) {
  using kvfolia::detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  if (plan.kv_heads != view.kv_heads || plan.key_dim != Layout::key_dim ||
      plan.value_dim != Layout::value_dim || plan.passes != pass_count<Quant>)
    return bad_argument("plan (made for another view)");
  if (batch.rows < 0 || batch.rows > plan.config.rows)
    return bad_argument("batch.rows", batch.rows, plan.config.rows);
  if (!batch.query_indptr && batch.rows > plan.config.queries)
    return bad_argument("batch.rows (queries)", batch.rows, plan.config.queries);
  if (auto ok = kvfolia::detail::validate_arrays(batch); !ok) return ok;
  if (auto ok = check_planes(view); !ok) return ok;
  if (auto ok = kvfolia::detail::validate(args, plan.config.queries, plan.config.query_heads); !ok) return ok;
  if (workspace_bytes < plan.workspace_bytes())
    return Error{Errc::workspace_too_small, "workspace", static_cast<std::int64_t>(plan.workspace_bytes()),
                 static_cast<std::int64_t>(workspace_bytes)};
  return {};
}

/// What both kernels are launched with.
template <class Layout, class Quant>
DecodeArgs<Layout, Quant> decode_args(const PagedView<Layout, Quant>& view, const BatchView& batch,
                                      const AttendArgs& args, const AttendPlan& plan, float* workspace) {
  const float scale =
      args.scale != 0.0f ? args.scale : 1.0f / __builtin_sqrtf(static_cast<float>(Layout::key_dim));
  return {view,
          batch,
          args,
          {workspace, workspace + plan.states() * plan.value_dim, plan.passes, plan.splits},
          plan.config.query_heads,
          plan.config.split_tokens,
          plan.blocks_of_8,
          plan.blocks_of_16,
          scale,
          args.soft_cap > 0.0f ? 1.0f / args.soft_cap : 0.0f};
}

/// A decode kernel: columns in tiles of eight, whether it is the general one, and the format of its pages.
template <int Tiles, bool General, int Format>
struct DecodeKernel {
  static constexpr int tiles = Tiles;
  static constexpr bool general = General;
  static constexpr int format = Format;
};

/// Calls launch(DecodeKernel, Grid), which returns a Result<>, for all that a plan takes.
template <class Layout, class Quant, int Tiles = 1, int Pass = 0, class Launch>
Result<> launch_kernels(const AttendPlan& plan, std::int32_t rows, bool plain, const Launch& launch) {
  if constexpr (Tiles > 2 || (Tiles == 2 && has_long_heads<Layout>)) {
    return {};
  } else if constexpr (Pass == pass_count<Quant>) {
    return launch_kernels<Layout, Quant, Tiles + 1, 0>(plan, rows, plain, launch);
  } else {
    const Grid grid = plan.decode_grid(rows, 8 * Tiles);
    const auto launch_one = [&]() -> Result<> {
      if (grid.x == 0 || grid.y == 0) return {};
      constexpr int format = pass_format<Quant>(Pass);
      if constexpr (has_plain_kernel<Quant, Tiles>)
        if (plain) return launch(DecodeKernel<Tiles, false, format>(), grid);
      return launch(DecodeKernel<Tiles, true, format>(), grid);
    };
    if (auto ok = launch_one(); !ok) return ok;
    return launch_kernels<Layout, Quant, Tiles, Pass + 1>(plan, rows, plain, launch);
  }
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI::cuda
