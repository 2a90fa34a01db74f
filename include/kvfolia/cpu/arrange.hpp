// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// From tokens behind one another to the element orders that keep several tokens side by side.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/vectors.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

inline constexpr int interleaved_bytes = 16;  ///< what vectors are interleaved within

/// Whether units of so many bytes can be interleaved by vectors.
constexpr bool interleaves(int unit) {
  return has_exact_vectors && (unit == 1 || unit == 2 || unit == 4 || unit == 8);
}

/// Unit 0 of every row, unit 1 of every row, and so on: `Rows` vectors in, as many out. Reads 16 bytes of
/// each row; vector i goes to `to` + i * to_stride.
template <int Unit, int Rows>
void interleave(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride);

#if HWY_TARGET != HWY_SCALAR  // that has no such operations, and needs none
template <int Unit, int Rows>
void interleave(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride) {
  using T = hwy::UnsignedFromSize<Unit>;
  const hn::FixedTag<T, interleaved_bytes / Unit> d;
  hn::Vec<decltype(d)> rows[Rows], next[Rows];
  for (int i = 0; i < Rows; ++i) rows[i] = hn::LoadU(d, reinterpret_cast<const T*>(from + i * from_stride));
  // Pairs from the two halves of the rows side by side, log2(Rows) times.
  for (int step = 1; step < Rows; step *= 2) {
    for (int i = 0; i < Rows / 2; ++i) {
      next[2 * i] = hn::InterleaveLower(d, rows[i], rows[i + Rows / 2]);
      next[2 * i + 1] = hn::InterleaveUpper(d, rows[i], rows[i + Rows / 2]);
    }
    for (int i = 0; i < Rows; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < Rows; ++i) hn::StoreU(rows[i], d, reinterpret_cast<T*>(to + i * to_stride));
}
#endif

/// [unit][slot] from [token][unit].
template <int Unit, int Bytes>
void arrange_units(const std::byte* from, std::byte* to, int count, std::int64_t page_tokens) {
  static_assert(Bytes % Unit == 0);
  if constexpr (interleaves(Unit) && Bytes >= interleaved_bytes) {
    constexpr int tokens = interleaved_bytes / Unit;
    if (count >= tokens) {
      // Whole vectors; the last ones begin earlier where tokens or bytes are no multiple of them.
      for (int b = 0; b < Bytes; b += interleaved_bytes) {
        const int byte = b < Bytes - interleaved_bytes ? b : Bytes - interleaved_bytes;
        for (int t = 0; t < count; t += tokens) {
          const int token = t < count - tokens ? t : count - tokens;
          interleave<Unit, tokens>(from + token * Bytes + byte, Bytes, to + byte * page_tokens + token * Unit,
                                   page_tokens * Unit);
        }
      }
      return;
    }
  }
  for (int b = 0; b < Bytes; b += Unit)
    for (int t = 0; t < count; ++t) std::memcpy(to + b * page_tokens + t * Unit, from + t * Bytes + b, Unit);
}

/// [slot / X][element][X] from [token][element]; slot 0 is at `to`.
template <int Element, int X, int Bytes>
void arrange_pairs(const std::byte* from, std::byte* to, int slot, int count) {
  for (int t = 0; t < count;) {
    const int begin = (slot + t) % X;
    const int tokens = count - t < X - begin ? count - t : X - begin;
    std::byte* group = to + std::int64_t{slot + t - begin} * Bytes;
    bool done = false;
    if constexpr (interleaves(Element) && std::has_single_bit(unsigned{X}) &&
                  X <= interleaved_bytes / Element && Bytes >= interleaved_bytes)
      if (tokens == X) {
        for (int b = 0; b < Bytes; b += interleaved_bytes) {
          const int byte = b < Bytes - interleaved_bytes ? b : Bytes - interleaved_bytes;
          interleave<Element, X>(from + t * Bytes + byte, Bytes, group + byte * X, interleaved_bytes);
        }
        done = true;
      }
    if (!done)
      for (int b = 0; b < Bytes; b += Element)
        for (int i = 0; i < tokens; ++i)
          std::memcpy(group + b * X + (begin + i) * Element, from + (t + i) * Bytes + b, Element);
    t += tokens;
  }
}

/// Whether tokens of elements of so many bits can be brought into an order, by arrange() where that is not
/// SlotMajor.
template <class Order, int Bits>
inline constexpr bool arranges = false;
template <int Bits>
inline constexpr bool arranges<SlotMajor, Bits> = true;
template <int X, int Bits>
inline constexpr bool arranges<DimMajor<X>, Bits> = X* Bits % 8 == 0;
template <int X, int Bits>
inline constexpr bool arranges<SlotPairs<X>, Bits> = Bits % 8 == 0;

/// Writes `count` tokens of `Bytes` bytes, behind one another in `from`, to the slots from `slot` on of a
/// tile whose elements have `Bits` bits.
template <int Bits, int Bytes, int X>
void arrange(DimMajor<X> /*order*/, const std::byte* from, std::byte* codes, int slot, int count,
             int page_tokens) {
  constexpr int unit = X * Bits / 8;
  arrange_units<unit, Bytes>(from, codes + std::int64_t{slot} * unit, count, page_tokens);
}
template <int Bits, int Bytes, int X>
void arrange(SlotPairs<X> /*order*/, const std::byte* from, std::byte* codes, int slot, int count,
             int /*page_tokens*/) {
  arrange_pairs<Bits / 8, X, Bytes>(from, codes, slot, count);
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
