// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Parameters of many groups side by side: the bits that fit_scale() and Range::fit() find one by one.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/convert.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/vectors.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Parameters of some groups, one a lane.
template <class DF>
struct Fitted {
  hn::Vec<IntsOf<DF>> scale;  ///< fp16, in the lower half
  hn::Vec<IntsOf<DF>> min;
  hn::Vec<DF> inverse;  ///< of the scale
  hn::Vec<DF> from;     ///< the min as a float
};

/// fit_scale() for a reach that is finite, and inverse().
template <int Top, class DF>
void fit_scales(DF df, hn::Vec<DF> reach, Fitted<DF>& fitted) {
  const IntsOf<DF> di;
  const auto rounded = round_to_halves(df, hn::Mul(reach, hn::Set(df, 1.0f / Top)));
  const auto reached = hn::Mul(widen_halves(df, rounded), hn::Set(df, Top + 0.5f));
  const auto clamps = hn::RebindMask(di, hn::Lt(reached, reach));
  const auto larger = hn::Add(rounded, bits_where(clamps, di, 1));
  fitted.scale = hn::Min(larger, hn::Set(di, 0x7bff));
  const auto scale = widen_halves(df, fitted.scale);
  const auto is_zero = hn::Eq(scale, hn::Zero(df));
  const auto one = hn::Set(df, 1.0f);
  const auto reciprocal = hn::Div(one, hn::IfThenElse(is_zero, one, scale));
  fitted.inverse = hn::IfThenElse(is_zero, hn::Zero(df), reciprocal);
}

/// What orders as floats do, as in Range; its own inverse.
template <class DI>
hn::Vec<DI> ordered_key(DI di, hn::Vec<DI> bits) {
  return hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff)));
}

/// Range::fit() for values that are finite.
template <class DF>
void fit_ranges(DF df, hn::Vec<IntsOf<DF>> low, hn::Vec<IntsOf<DF>> high, Fitted<DF>& fitted) {
  const IntsOf<DF> di;
  const auto most = hn::Set(df, 65504.0f), least = hn::Set(df, -65504.0f);
  const auto smallest = hn::BitCast(df, ordered_key(di, low));
  const auto largest = hn::BitCast(df, ordered_key(di, high));
  const auto from = hn::Min(hn::Max(smallest, least), most), to = hn::Min(hn::Max(largest, least), most);
  const auto nearest = round_to_halves(df, from);
  // One fp16 further down where that is above: away from zero for a negative one.
  const auto negative = hn::Ne(hn::And(nearest, hn::Set(di, 0x8000)), hn::Zero(di));
  const auto is_zero = hn::Eq(hn::And(nearest, hn::Set(di, 0x7fff)), hn::Zero(di));
  const auto step = hn::IfThenElse(negative, hn::Set(di, 1), hn::Set(di, -1));
  const auto below = hn::IfThenElse(is_zero, hn::Set(di, 0x8001), hn::Add(nearest, step));
  const auto above = hn::RebindMask(di, hn::Gt(widen_halves(df, nearest), from));
  const auto rounded_down = hn::IfThenElse(above, below, nearest);
  fit_scales<15>(df, hn::Sub(to, widen_halves(df, rounded_down)), fitted);
  const auto constant = hn::Eq(smallest, largest);
  const auto is_constant = hn::RebindMask(di, constant);
  fitted.min = hn::IfThenElse(is_constant, nearest, rounded_down);
  fitted.from = widen_halves(df, fitted.min);
  fitted.scale = hn::IfThenElseZero(hn::Not(is_constant), fitted.scale);
  fitted.inverse = hn::IfThenElseZero(hn::Not(constant), fitted.inverse);
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
