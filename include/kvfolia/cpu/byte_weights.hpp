// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Floats as multiples of a step that two signed bytes hold, for 8-bit dot products: 15 bits of each.

#include <math.h>

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// The step of which the largest of some numbers is 127 * 128; NaN if one of them is not finite.
inline float byte_step(const float* x, int count) {
  Floats most = zeros(), zero = zeros();  // x - x, or NaN
  int i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Floats v = load(x + i);
    most = hn::Max(most, hn::Abs(v));
    zero = hn::Add(zero, hn::Sub(v, v));
  }
  float amax = max_of(most), rest = sum_of(zero);
  for (; i < count; ++i) {
    amax = std::max(amax, fabsf(x[i]));
    rest += x[i] - x[i];
  }
  return amax / (127.0f * 128.0f) + rest;
}

/// Two sums.
struct ByteSums {
  std::int32_t high = 0;
  std::int32_t low = 0;
};

/// x[i] = step * (128 * high[i] + low[i]), rounded to nearest, and the sums of both; zeros where the step is
/// too small to be divided by, or no number.
inline ByteSums round_to_bytes(const float* x, int count, float step, std::int8_t* high, std::int8_t* low) {
  ByteSums sums;
  if (!(step >= 0x1p-126f)) {
    std::fill_n(high, count, std::int8_t{0});
    std::fill_n(low, count, std::int8_t{0});
    return sums;
  }
  const Int32Tag i32;
  const hn::Rebind<std::int8_t, Int32Tag> i8;
  const float inverse = 1.0f / step;
  Int32s high_sums = hn::Zero(i32), low_sums = hn::Zero(i32);
  int i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Int32s code = hn::NearestInt(hn::Mul(load(x + i), broadcast(inverse)));
    const Int32s upper = hn::ShiftRight<7>(hn::Add(code, hn::Set(i32, 64)));
    const Int32s lower = hn::Sub(code, hn::ShiftLeft<7>(upper));
    hn::StoreU(hn::DemoteTo(i8, upper), i8, high + i);
    hn::StoreU(hn::DemoteTo(i8, lower), i8, low + i);
    high_sums = hn::Add(high_sums, upper);
    low_sums = hn::Add(low_sums, lower);
  }
  sums.high = hn::GetLane(hn::SumOfLanes(i32, high_sums));
  sums.low = hn::GetLane(hn::SumOfLanes(i32, low_sums));
  for (; i < count; ++i) {
    const auto code = static_cast<std::int32_t>(nearbyintf(x[i] * inverse));
    const std::int32_t upper = (code + 64) >> 7, lower = code - upper * 128;
    high[i] = static_cast<std::int8_t>(upper);
    low[i] = static_cast<std::int8_t>(lower);
    sums.high += upper;
    sums.low += lower;
  }
  return sums;
}

/// Of every eight bytes those with even numbers first: as the codes of 4 bits that one word holds come.
inline void even_bytes_first(const std::int8_t* from, int count, std::int8_t* to) {
  for (int i = 0; i < count; i += 8)
    for (int k = 0; k < 4; ++k) {
      to[i + k] = from[i + 2 * k];
      to[i + 4 + k] = from[i + 2 * k + 1];
    }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
