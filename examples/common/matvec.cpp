// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A decoding step reads every weight once and should do so as fast as memory gives them: a block is widened
// in registers and multiplied there.

#include "common/matvec.hpp"

#include <cstddef>
#include <type_traits>

#include "common/bytes.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia_examples {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// At most as many lanes as half a block has elements.
using Floats = hn::CappedTag<float, 16>;
using Vector = hn::Vec<Floats>;
template <class T>
using Narrow = hn::Rebind<T, Floats>;
constexpr Floats floats;
constexpr Narrow<std::int32_t> ints;
constexpr int lanes = static_cast<int>(hn::MaxLanes(floats));

template <class T>
hn::Vec<Narrow<T>> load_narrow(const std::byte* from) {
  return hn::LoadU(Narrow<T>(), reinterpret_cast<const T*>(from));
}

/// The fp16 at `from` in every lane.
Vector load_scale(const std::byte* from) {
  const Narrow<std::uint16_t> bits;
  const Narrow<hwy::float16_t> halves;
  return hn::PromoteTo(floats, hn::BitCast(halves, hn::Set(bits, load<std::uint16_t>(from))));
}

// A format's `widen` calls use(i, v) for every vector v of a block's weights, which begins at element i.

/// 16 bytes of codes: low nibbles are elements 0-15, high ones 16-31.
template <class Use>
void widen_nibbles(const std::byte* codes, Vector scale, Vector minimum, Use use) {
  for (int i = 0; i < 16; i += lanes) {
    const auto bytes = hn::PromoteTo(ints, load_narrow<std::uint8_t>(codes + i));
    const auto low = hn::And(bytes, hn::Set(ints, 15)), high = hn::ShiftRight<4>(bytes);
    use(i, hn::MulAdd(scale, hn::ConvertTo(floats, low), minimum));
    use(16 + i, hn::MulAdd(scale, hn::ConvertTo(floats, high), minimum));
  }
}

struct Q4_0 {
  static constexpr int elements = 32;
  static constexpr int bytes = 18;
  template <class Use>
  static void widen(const std::byte* block, Use use) {
    const Vector scale = load_scale(block);
    widen_nibbles(block + 2, scale, hn::Mul(scale, hn::Set(floats, -8.0f)), use);
  }
};

struct Q4_1 {
  static constexpr int elements = 32;
  static constexpr int bytes = 20;
  template <class Use>
  static void widen(const std::byte* block, Use use) {
    widen_nibbles(block + 4, load_scale(block), load_scale(block + 2), use);
  }
};

struct Q8_0 {
  static constexpr int elements = 32;
  static constexpr int bytes = 34;
  template <class Use>
  static void widen(const std::byte* block, Use use) {
    const Vector scale = load_scale(block);
    for (int i = 0; i < elements; i += lanes) {
      const auto codes = hn::PromoteTo(ints, load_narrow<std::int8_t>(block + 2 + i));
      use(i, hn::Mul(scale, hn::ConvertTo(floats, codes)));
    }
  }
};

/// Floats of 32 or 16 bits; a block is what others have.
template <class T>
struct Plain {
  static constexpr int elements = 32;
  static constexpr int bytes = elements * static_cast<int>(sizeof(T));
  template <class Use>
  static void widen(const std::byte* block, Use use) {
    for (int i = 0; i < elements; i += lanes) {
      const auto values = load_narrow<T>(block + static_cast<std::size_t>(i) * sizeof(T));
      if constexpr (std::is_same_v<T, float>)
        use(i, values);
      else
        use(i, hn::PromoteTo(floats, values));
    }
  }
};

/// One row times Tokens vectors. Each has two sums, which the vectors of a block join in turn.
template <class Format, int Tokens>
void dot(const std::byte* row, std::int64_t cols, const MatvecArgs& args, std::int64_t token, float* out) {
  Vector sums[Tokens][2];
  const float* x[Tokens];
  for (int t = 0; t < Tokens; ++t) {
    sums[t][0] = sums[t][1] = hn::Zero(floats);
    x[t] = args.x + (token + t) * args.x_stride;
  }
  for (std::int64_t at = 0; at < cols; at += Format::elements, row += Format::bytes) {
    __builtin_prefetch(row + 2048);  // rows to come: the processor's own looking ahead ends with a page
    Format::widen(row, [&](int i, Vector weights) HWY_ATTR {
      for (int t = 0; t < Tokens; ++t) {
        Vector& sum = sums[t][i / 16 % 2];
        sum = hn::MulAdd(weights, hn::LoadU(floats, x[t] + at + i), sum);
      }
    });
  }
  for (int t = 0; t < Tokens; ++t)
    out[(token + t) * args.out_stride] = hn::GetLane(hn::SumOfLanes(floats, hn::Add(sums[t][0], sums[t][1])));
}

/// Groups of tokens outermost: the rows of a call stay cached, and so do the tokens of a group.
template <class Format, int Tokens>
std::int64_t multiply(const GgufTensor& weight, std::int64_t begin, std::int64_t end, const MatvecArgs& args,
                      std::int64_t token) {
  for (; token + Tokens <= args.tokens; token += Tokens)
    for (std::int64_t r = begin; r < end; ++r)
      dot<Format, Tokens>(weight.row(r), weight.cols(), args, token, args.out + r);
  return token;
}

/// Calls `visit` with the format of `type`; false when it has no kernel.
template <class Visit>
bool visit_format(TensorType type, Visit visit) {
  switch (type) {
    case TensorType::F32: return visit(Plain<float>{}), true;
    case TensorType::F16: return visit(Plain<hwy::float16_t>{}), true;
    case TensorType::BF16: return visit(Plain<hwy::bfloat16_t>{}), true;
    case TensorType::Q4_0: return visit(Q4_0{}), true;
    case TensorType::Q4_1: return visit(Q4_1{}), true;
    case TensorType::Q8_0: return visit(Q8_0{}), true;
    default: return false;
  }
}

}  // namespace

bool has_matvec(const GgufTensor& weight) {
  bool whole_blocks = false;
  visit_format(weight.type,
               [&]<class Format>(Format) { whole_blocks = weight.cols() % Format::elements == 0; });
  return whole_blocks;
}

void matvec(const GgufTensor& weight, std::int64_t begin, std::int64_t end, const MatvecArgs& args) {
  visit_format(weight.type, [&]<class Format>(Format) {
    std::int64_t token = multiply<Format, 8>(weight, begin, end, args, 0);
    token = multiply<Format, 4>(weight, begin, end, args, token);
    multiply<Format, 1>(weight, begin, end, args, token);
  });
}

}  // namespace kvfolia_examples
