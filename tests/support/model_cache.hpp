// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What sequences of a cache should hold: a plain list of tokens each, whose pages are coded one by one
// with the quantizer's own encode() and decode(). Knows no pools, references, copies or recodes.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "support/scenario.hpp"

namespace kvfolia_tests {

/// A token as its pages hold it: [layer][head][key, then value].
struct ModelToken {
  int id = 0;
  int format = -1;                ///< of the page that it was written to; -1: not written yet
  std::vector<float> values{};    ///< as decode() gives them
  std::vector<double> allowed{};  ///< [layer][head][side], how far they may be from what the model made
};

struct ModelSequence {
  std::vector<std::shared_ptr<const ModelToken>> tokens;
  std::vector<int> formats;  ///< of its pages

  int length() const { return static_cast<int>(tokens.size()); }
  int written() const {
    int n = 0;
    while (n < length() && tokens[static_cast<std::size_t>(n)]->format >= 0) ++n;
    return n;
  }
};

template <class Layout, class Quant>
class ModelCache {
 public:
  static constexpr int exact = exact_format<Quant>;
  static constexpr int low = low_format<Quant>;
  static constexpr bool seals = Quant::seal_tokens > 1;
  static constexpr int key_dim = Layout::key_dim;
  static constexpr int value_dim = Layout::shares_key_value ? 0 : Layout::value_dim;

  ModelCache(const CacheShape& shape, int page_tokens, int exact_sink_pages)
      : layers_(shape.layers), heads_(shape.kv_heads), size_(page_tokens), sinks_(exact_sink_pages) {}

  int format_at(int page, bool full) const {
    return page < sinks_ || (seals && !full) ? exact : coded_format;
  }

  void extend(ModelSequence& s, int tokens) {
    if (tokens == 0) return;
    const int first = s.length() / size_;
    for (int i = 0; i < tokens; ++i) {
      ModelToken token;
      token.id = next_id_++;
      s.tokens.push_back(std::make_shared<const ModelToken>(std::move(token)));
    }
    s.formats.resize(static_cast<std::size_t>((s.length() + size_ - 1) / size_));
    for (int page = first; page < static_cast<int>(s.formats.size()); ++page)
      s.formats[static_cast<std::size_t>(page)] = format_at(page, (page + 1) * size_ <= s.length());
  }
  void truncate(ModelSequence& s, int length) const {
    s.tokens.resize(static_cast<std::size_t>(length));
    s.formats.resize(static_cast<std::size_t>((length + size_ - 1) / size_));
    if (length % size_ != 0) s.formats.back() = format_at(length / size_, false);
  }
  bool can_demote(const ModelSequence& s, int page) const {
    return low >= 0 && page >= sinks_ && (page + 1) * size_ <= s.written() &&
           s.formats[static_cast<std::size_t>(page)] == coded_format;
  }
  void demote(ModelSequence& s, int page) const { s.formats[static_cast<std::size_t>(page)] = low; }

  /// What a model would give for a token, of one layer and head: not rounded, not rotated.
  static float element(int id, int layer, int head, int d, bool value) {
    Random random(static_cast<std::uint64_t>((((id * 4 + layer) * 4 + head) * 64 + d) * 2 + (value ? 1 : 0)));
    return static_cast<float>(4.0 * random.uniform() - 2.0 + (value ? 0.0 : d % 5));  // keys have biases
  }

  /// The step is committed and appended: pages that it filled, cut or demoted get their contents.
  void write(ModelSequence& s) const {
    for (int page = 0; page < static_cast<int>(s.formats.size()); ++page) {
      const int begin = page * size_, count = std::min(size_, s.length() - begin);
      const int kept = std::clamp(s.written() - begin, 0, count);
      const int format = s.formats[static_cast<std::size_t>(page)];
      const bool same = kept > 0 && s.tokens[static_cast<std::size_t>(begin)]->format == format;
      if (kept < count || !same) write_page(s, begin, count, kept, format, same);
    }
  }

  /// Whether a slot holds exactly what the model has.
  bool holds(const PagedView<Layout, Quant>& view, TableEntry entry, int slot, int layer,
             const ModelToken& token) const {
    float got[key_dim + value_dim];
    for (int head = 0; head < heads_; ++head) {
      visit_format(view, entry, [&](const auto& quant) {
        key_side(quant).decode(view.key_tile(entry, head), slot, got);
        if constexpr (value_dim > 0)
          value_side(quant).decode(view.value_tile(entry, head), slot, got + key_dim);
      });
      const float* expected = token.values.data() + (layer * heads_ + head) * (key_dim + value_dim);
      for (int d = 0; d < key_dim + value_dim; ++d)
        if (!(got[d] == expected[d])) return false;
    }
    return true;
  }

  /// Values that were further from the tokens' own than their quantizers allow.
  int too_far() const { return too_far_; }

 private:
  void write_page(ModelSequence& s, int begin, int count, int kept, int format, bool same) const {
    const bool whole = format == low || (seals && format == coded_format);
    std::vector<ModelToken> tokens;
    for (int t = 0; t < count; ++t) {
      tokens.push_back(*s.tokens[static_cast<std::size_t>(begin + t)]);
      tokens.back().values.resize(static_cast<std::size_t>(layers_ * heads_ * (key_dim + value_dim)));
      tokens.back().allowed.resize(static_cast<std::size_t>(layers_ * heads_ * 2), 0.0);
    }
    PagedView<Layout, Quant> formats;
    visit_format(formats, TableEntry::make(format, PageId{0}), [&](const auto& quant) {
      for (int layer = 0; layer < layers_; ++layer)
        for (int head = 0; head < heads_; ++head) {
          write_plane<typename Layout::KeyOrder>(key_side(quant), KeySide<typename Quant::Exact>{}, key_dim,
                                                 layer, head, false, tokens, kept, whole, same);
          if constexpr (value_dim > 0)
            write_plane<typename Layout::ValueOrder>(value_side(quant), ValueSide<typename Quant::Exact>{},
                                                     value_dim, layer, head, true, tokens, kept, whole, same);
        }
    });
    for (int t = 0; t < count; ++t) {
      tokens[static_cast<std::size_t>(t)].format = format;
      s.tokens[static_cast<std::size_t>(begin + t)] =
          std::make_shared<const ModelToken>(std::move(tokens[static_cast<std::size_t>(t)]));
    }
  }

  template <class Order, class Q, class Exact>
  void write_plane(const Q& quant, const Exact& exact_quant, int dims, int layer, int head, bool value,
                   std::vector<ModelToken>& tokens, int kept, bool whole, bool same) const {
    using Code = typename Exact::Code;
    const int count = static_cast<int>(tokens.size());
    const int at = (layer * heads_ + head) * (key_dim + value_dim) + (value ? key_dim : 0);
    std::vector<float> rows(static_cast<std::size_t>(count * dims)), own(rows);
    double lowest = 0.0, highest = 0.0;
    for (int t = 0; t < count; ++t) {
      float* row = rows.data() + t * dims;
      float* mine = own.data() + t * dims;
      for (int d = 0; d < dims; ++d)
        mine[d] = element(tokens[static_cast<std::size_t>(t)].id, layer, head, d, value);
      to_stored(exact_quant, mine, dims);
      for (int d = 0; d < dims; ++d) {
        row[d] =
            t < kept ? tokens[static_cast<std::size_t>(t)].values[static_cast<std::size_t>(at + d)] : mine[d];
        if (whole || t < kept) row[d] = static_cast<float>(static_cast<Code>(row[d]));
        lowest = std::min(lowest, double{row[d]});
        highest = std::max(highest, double{row[d]});
      }
    }
    std::vector<std::byte> codes(static_cast<std::size_t>(code_bytes<Q>(dims) * size_));
    std::vector<std::byte> params(static_cast<std::size_t>(Q::param_bytes(dims, size_)));
    const Tile<Order, std::byte> tile{codes.data(), params.data(),       dims,
                                      size_,        code_bytes<Q>(dims), Q::param_bytes(dims, size_) / size_};
    quant.encode(tile, 0, count, Rows{rows.data(), dims});
    // Half a step over the whole range (twice that where a mean is taken away), and fp16's rounding.
    const double step = Q::code_bits == 4 ? 1.0 / 15 : Q::code_bits == 8 ? 1.0 / 127 : 0.0;
    const double moved = (highest - lowest) * (step + 0x1p-10);
    for (int t = 0; t < count; ++t) {
      if (t < kept && same && !whole) continue;
      ModelToken& token = tokens[static_cast<std::size_t>(t)];
      double& allowed =
          token.allowed[static_cast<std::size_t>((layer * heads_ + head) * 2 + (value ? 1 : 0))];
      allowed += moved;
      float decoded[key_dim > Layout::value_dim ? key_dim : Layout::value_dim];
      quant.decode(tile, t, decoded);
      for (int d = 0; d < dims; ++d) {
        token.values[static_cast<std::size_t>(at + d)] = decoded[d];
        too_far_ += !(std::fabs(double{decoded[d]} - own[static_cast<std::size_t>(t * dims + d)]) <= allowed);
        if (Q::code_bits >= 16 && t >= kept)
          too_far_ += decoded[d] !=
                      static_cast<float>(static_cast<Code>(own[static_cast<std::size_t>(t * dims + d)]));
      }
    }
  }

  int layers_, heads_, size_, sinks_;
  int next_id_ = 0;
  mutable int too_far_ = 0;
};

}  // namespace kvfolia_tests
