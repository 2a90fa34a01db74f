// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Who computes which part of attention: what a plan is.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// Attention is reduced over tiles of so many logical positions, and tiles are merged from left to
/// right. Neither the batch nor the threads move a tile's border, so they change no bit.
inline constexpr int tile_positions = 256;
/// Of attend()'s workspace, in bytes: what operator new gives.
inline constexpr int workspace_alignment = alignof(std::max_align_t);
inline constexpr int cache_line = 64;  ///< bytes

/// Which of two implementations computes attention.
enum class AttendPath : std::uint8_t {
  fast,  ///< vectors of the instruction set that is compiled for; within a tolerance of the plain path
  plain  ///< the same bits for every page size, element order and instruction set
};

/// What the plan depends on besides the batch.
struct AttendConfig {
  std::int32_t query_heads = 0;  ///< a multiple of the view's kv_heads
  std::int32_t concurrency = 1;  ///< the executor's
  AttendPath path = AttendPath::fast;
};

struct AttendPlan {
  /// Queries [query_begin, query_end) of a row for one KV head, over tiles [tile_begin, tile_end).
  struct Task {
    std::int32_t row;
    std::int32_t head;
    std::int32_t query_begin;
    std::int32_t query_end;
    std::int64_t tile_begin;
    std::int64_t tile_end;
    std::int64_t partial;           ///< where its tiles' states go; -1: the task writes the output itself
    bool streams;                   ///< pages are read in place; decoded once for many queries otherwise
    std::int32_t first_sharer = 0;  ///< of `sharers`
    std::int32_t sharer_count = 0;  ///< rows with the tiles in common, in place of `row`; 0: all are its own
  };

  /// A row with one query whose table begins as others' do.
  struct Sharer {
    std::int32_t row;
    std::int64_t partial;
  };

  /// Two rows whose tables must still begin with as many tiles in common.
  struct Common {
    std::int32_t row;
    std::int32_t other;
    std::int64_t tiles;
  };

  /// What a batch must still have when the plan is used.
  struct Row {
    std::int32_t queries;
    std::int32_t length;
    LogicalPos first_query;
    std::int64_t tiles;  ///< over all tables of the row
    friend bool operator==(Row, Row) = default;
  };

  std::vector<Task> tasks;
  std::vector<Task> merges;  ///< over all tiles of what tasks left as states
  std::vector<Sharer> sharers;
  std::vector<Common> commons;
  AttendConfig config;
  std::vector<Row> rows;
  std::int32_t kv_heads = 0;
  std::int32_t page_tokens = 0;
  std::int32_t key_dim = 0;
  std::int32_t value_dim = 0;
  bool amx = false;                 ///< rows with many queries are multiplied in matrix registers
  std::int64_t scratch_rows = 0;    ///< queries times heads of a group that a worker keeps at a time
  std::int64_t scratch_floats = 0;  ///< of one worker
  std::int64_t states = 0;          ///< of one query, head and tile each
  std::int64_t state_floats = 0;    ///< maximum, sum and accumulated values

  /// Exactly what attend() needs, aligned to workspace_alignment.
  std::size_t workspace_bytes() const {
    return static_cast<std::size_t>(config.concurrency * scratch_floats + states * state_floats) *
               sizeof(float) +
           cache_line - workspace_alignment;
  }
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
