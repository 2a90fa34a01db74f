// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Scales and offsets of channels: where a block of tokens has them in a page, and how they come out of shared
// memory. None of them costs an element anything: those of keys are multiplied with queries, a block at a
// time, and those of values with a block's sums.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/unpack.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/rotated.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Of two channels, as fp16 each.
struct ChannelPair {
  std::uint32_t scales;
  std::uint32_t offsets;
};
/// What those of a whole block are multiplied by.
struct ChannelUnits {
  float scale = 1.0f;
  float offset = 1.0f;
};

/// How a quantizer keeps them: `channel_bytes` for every channel, behind `head_bytes` for all of a block;
/// blocks behind one another, from the beginning of a page's parameters on.
template <class Q>
struct ChannelFormat {
  static constexpr int channel_bytes = 0;
  static constexpr int head_bytes = 0;
  static constexpr bool has_units = false;
};

template <int Tokens>
struct ChannelFormat<Int4Channels<Tokens>> {
  static constexpr int channel_bytes = sizeof(ScaleMin);
  static constexpr int head_bytes = 0;
  static constexpr bool has_units = false;

  /// Of channels a and b of those whose bytes are in `words`.
  template <class Ctx, int Words>
  KVF_INLINE KVF_HD static ChannelPair pair(const std::uint32_t (&words)[Words], int a, int b) {
    return {Ctx::prmt(words[a], words[b], 0x5410u), Ctx::prmt(words[a], words[b], 0x7632u)};
  }
};

/// Halves a and b of what is in `words`.
template <class Ctx, int Words>
KVF_INLINE KVF_HD std::uint32_t pair_of_halves(const std::uint32_t (&words)[Words], int a, int b) {
  const std::uint32_t selector = (a % 2 == 0 ? 0x10u : 0x32u) | (b % 2 == 0 ? 0x5400u : 0x7600u);
  return Ctx::prmt(words[a / 2], words[b / 2], selector);
}

template <class Q, int Tokens>
struct ChannelFormat<Centered<Q, Tokens>> {
  static constexpr int channel_bytes = sizeof(fp16);
  static constexpr int head_bytes = 0;
  static constexpr bool has_units = false;

  template <class Ctx, int Words>
  KVF_INLINE KVF_HD static ChannelPair pair(const std::uint32_t (&words)[Words], int a, int b) {
    return {0, pair_of_halves<Ctx>(words, a, b)};
  }
};

template <int Tokens>
struct ChannelFormat<Compact4Channels<Tokens>> {
  static constexpr int channel_bytes = sizeof(typename Compact4Channels<Tokens>::Param);
  static constexpr int head_bytes = 2 * sizeof(fp16);
  static constexpr bool has_units = true;

  template <class Ctx, int Words>
  KVF_INLINE KVF_HD static ChannelPair pair(const std::uint32_t (&words)[Words], int a, int b) {
    // A scale from 0 to 255 and a min less -128, each as the low bits of an fp16 from 1024 on.
    constexpr std::uint32_t exponent = 0x64646464u, less = 0xe400e400u, less_bias = 0xe480e480u;
    const std::uint32_t both = pair_of_halves<Ctx>(words, a, b);
    const std::uint32_t biased = both ^ 0x80008000u;
    const std::uint32_t offsets = Ctx::add_fp16x2(Ctx::prmt(biased, exponent, 0x4341u), less_bias);
    // A min of -128 stands for NaN: borrowed from, its half alone keeps the upper bit.
    const std::uint32_t mins = (biased >> 8) & 0x00ff00ffu;
    const std::uint32_t nans = ((0x80008000u - mins) & 0x80008000u) >> 15;
    return {Ctx::add_fp16x2(Ctx::prmt(both, exponent, 0x4240u), less), offsets | nans * 0x7e00u};
  }
  /// From what a block's channels have in common.
  KVF_INLINE KVF_HD static ChannelUnits units(std::uint32_t head) {
    return {half_of(head, 0) * (1.0f / 256.0f), half_of(head, 1) * (1.0f / 128.0f)};
  }
};

template <class Q, int Block>
struct ChannelFormat<Rotated<Q, Block>> : ChannelFormat<Q> {};

/// A block's, in shared memory: channels begin at a multiple of 16, right behind what they have in common.
template <class Ctx, class Q>
class StagedChannels {
 public:
  using Format = ChannelFormat<Q>;
  static constexpr SharedOffset first = (Format::head_bytes + 15) / 16 * 16;
  /// Where the block's bytes come to.
  static constexpr SharedOffset begin = first - Format::head_bytes;

  /// Reads so many channels from one on, a multiple of their number.
  template <int Count>
  class Run {
   public:
    KVF_INLINE KVF_HD Run(Ctx& ctx, SharedOffset at, int channel) {
      const SharedOffset from = at + first + static_cast<SharedOffset>(channel * Format::channel_bytes);
      constexpr int unit = largest_unit(bytes);
      KVF_UNROLL
      for (int i = 0; i < bytes; i += unit)
        read<unit>(ctx, from + static_cast<SharedOffset>(i), words_ + i / 4);
    }
    KVF_INLINE KVF_HD ChannelPair pair(int a, int b) const {
      return Format::template pair<Ctx>(words_, a, b);
    }

   private:
    static constexpr int bytes = Count * Format::channel_bytes;
    static_assert(bytes % 4 == 0);

    template <int Unit>
    KVF_INLINE KVF_HD static void read(Ctx& ctx, SharedOffset at, std::uint32_t* words) {
      if constexpr (Unit == 16) {
        const auto four = ctx.template load_shared<Words4>(at);
        KVF_UNROLLED (i, 4) words[i] = four.words[i];
      } else if constexpr (Unit == 8) {
        const auto two = ctx.template load_shared<std::uint64_t>(at);
        words[0] = static_cast<std::uint32_t>(two);
        words[1] = static_cast<std::uint32_t>(two >> 32);
      } else {
        words[0] = ctx.template load_shared<std::uint32_t>(at);
      }
    }
    std::uint32_t words_[bytes / 4];
  };

  KVF_INLINE KVF_HD static ChannelUnits units(Ctx& ctx, SharedOffset at) {
    if constexpr (Format::has_units)
      return Format::units(ctx.template load_shared<std::uint32_t>(at + begin));
    else
      return {};
  }
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
