// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The context that runs the bodies of CUDA kernels on the host, and the grid that they run in.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/small_floats.hpp"
#include "kvfolia/cuda/context.hpp"
#include "simt/access_counts.hpp"
#include "simt/block.hpp"
#include "simt/fragments.hpp"
#include "simt/memory_checks.hpp"

namespace kvfolia_tests::simt {

struct Dim3 {
  int x = 1;
  int y = 1;
  int z = 1;
};

struct LaunchConfig {
  Dim3 grid{};
  int threads = 128;
  std::uint32_t shared_bytes = 0;
  std::uint32_t shared_granule = 4;  ///< the narrowest access to shared memory
  bool counts_requests = false;      ///< bank conflicts and sectors, which cost time
};

/// What a kernel did that it must not.
class KernelFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

using kvfolia::bf16;
using kvfolia::fp16;

inline float fp16_of(std::uint32_t word, int half) {
  return static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(word >> 16 * half)));
}
inline float bf16_of(std::uint32_t word, int half) {
  return static_cast<float>(bf16::from_bits(static_cast<std::uint16_t>(word >> 16 * half)));
}

/// Rounded once: by way of a float that keeps, in its last bit, that something was cut off.
inline fp16 to_fp16(double x) {
  auto narrow = static_cast<float>(x);
  if (std::isfinite(narrow) && static_cast<double>(narrow) != x) {
    if (std::fabs(static_cast<double>(narrow)) > std::fabs(x)) narrow = std::nextafterf(narrow, 0.0f);
    narrow = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, narrow) | 1u);
  }
  return fp16(narrow);
}

/// What the threads of a block share, beside their rendezvous.
struct BlockState {
  const LaunchConfig& config;
  GlobalMemory& global;
  Counts& counts;
  Block block;
  SharedMemory shared;
  WarpRequests requests;
  std::map<std::pair<std::string, int>, std::uint64_t> places{};
  int block_number = 0;
  Dim3 at{};

  BlockState(const LaunchConfig& c, GlobalMemory& g, Counts& n)
      : config(c),
        global(g),
        counts(n),
        block(c.threads),
        shared(c.shared_bytes, c.shared_granule),
        requests(c.threads / kvfolia::cuda::warp_size) {}
};

}  // namespace detail

class HostContext {
 public:
  HostContext(detail::BlockState& state, int thread) : state_(&state), thread_(thread) {}
  HostContext(const HostContext&) = delete;
  HostContext& operator=(const HostContext&) = delete;

  int thread() const { return thread_; }
  int lane() const { return thread_ % kvfolia::cuda::warp_size; }
  int warp() const { return thread_ / kvfolia::cuda::warp_size; }
  int block_x() const { return state_->at.x; }
  int block_y() const { return state_->at.y; }
  int block_z() const { return state_->at.z; }

  void sync(Site site = Site::here()) {
    ++state_->counts.warp_operations;
    state_->block.sync(thread_, site);
    turns_.clear();
    ++barriers_;
  }
  void sync_warp(Site site = Site::here()) {
    ++state_->counts.warp_operations;
    state_->block.sync_warp(thread_, site);
  }

  template <class T>
  T shfl(T value, int from, Site site = Site::here()) {
    return shuffle(value, from, "shfl", site);
  }
  template <class T>
  T shfl_xor(T value, int mask, Site site = Site::here()) {
    return shuffle(value, lane() ^ mask, "shfl_xor", site);
  }
  std::uint32_t ballot(bool vote, Site site = Site::here()) { return votes(vote, "ballot", site); }
  bool any(bool vote, Site site = Site::here()) { return votes(vote, "any", site) != 0; }

  template <class T>
  T load(const T* from, Site site = Site::here()) {
    touch_global(from, sizeof(T), false, site);
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  template <class T>
  void store(T* to, T value, Site site = Site::here()) {
    touch_global(to, sizeof(T), true, site);
    std::memcpy(to, &value, sizeof(T));
  }
  template <class T>
  T load_shared(std::uint32_t at, Site site = Site::here()) {
    touch_shared(at, sizeof(T), SharedMemory::Kind::read, site);
    T value;
    std::memcpy(&value, state_->shared.at(at), sizeof(T));
    return value;
  }
  template <class T>
  void store_shared(std::uint32_t at, T value, Site site = Site::here()) {
    touch_shared(at, sizeof(T), SharedMemory::Kind::write, site);
    std::memcpy(state_->shared.at(at), &value, sizeof(T));
  }

  template <int Bytes>
  void cp_async(std::uint32_t to, const void* from, Site site = Site::here()) {
    cp_async<Bytes>(to, from, true, site);
  }
  template <int Bytes>
  void cp_async(std::uint32_t to, const void* from, bool valid, Site site = Site::here()) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    if (valid) touch_global(from, Bytes, false, site);
    touch_shared(to, Bytes, SharedMemory::Kind::copy_begins, site);
    std::memset(state_->shared.at(to), 0xff, Bytes);
    open_.push_back({to, Bytes, valid ? from : nullptr, site});
  }
  void cp_async_commit() { groups_.push_back(std::exchange(open_, {})); }
  template <int InFlight>
  void cp_async_wait() {
    for (; groups_.size() > InFlight; groups_.pop_front())
      for (const Copy& copy : groups_.front()) {
        touch_shared(copy.to, copy.bytes, SharedMemory::Kind::copy_lands, copy.site);
        if (copy.from)
          std::memcpy(state_->shared.at(copy.to), copy.from, copy.bytes);
        else
          std::memset(state_->shared.at(copy.to), 0, copy.bytes);
      }
  }

  void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t row, Site site = Site::here()) {
    ldmatrix(r, row, false, site);
  }
  void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t row, Site site = Site::here()) {
    ldmatrix(r, row, true, site);
  }
  std::uint32_t movmatrix(std::uint32_t x, Site site = Site::here()) {
    struct Argument {
      std::uint32_t from, to;
    } argument{x, 0};
    meet("movmatrix", site, argument, [](Argument* const* lanes) {
      std::uint16_t matrix[8][8];
      each_element(2, quarter_element, [&](int lane, int i, Element e) {
        matrix[e.row][e.col] = static_cast<std::uint16_t>(lanes[lane]->from >> 16 * i);
      });
      each_element(2, quarter_element, [&](int lane, int i, Element e) {
        lanes[lane]->to |= std::uint32_t{matrix[e.col][e.row]} << 16 * i;
      });
    });
    return argument.to;
  }
  void mma_fp16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                Site site = Site::here()) {
    mma(d, a, b, "mma_fp16", detail::fp16_of, site);
  }
  void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                Site site = Site::here()) {
    mma(d, a, b, "mma_bf16", detail::bf16_of, site);
  }

  static std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t bytes = a | std::uint64_t{b} << 32;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t choice = selector >> 4 * i & 0xf;
      const std::uint32_t byte = bytes >> 8 * (choice & 7) & 0xff;
      result |= (choice < 8 ? byte : byte < 0x80 ? 0u : 0xffu) << 8 * i;
    }
    return result;
  }
  static std::uint32_t and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) { return (a & b) | c; }
  static int popc(std::uint32_t x) { return std::popcount(x); }
  static std::uint32_t add_fp16x2(std::uint32_t a, std::uint32_t b) {
    return each_half([&](int i) {
      return detail::to_fp16(double{detail::fp16_of(a, i)} + double{detail::fp16_of(b, i)});
    });
  }
  static std::uint32_t fma_fp16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return each_half(
        [&](int i) {  // products of two fp16 and sums with a third lose nothing that rounding sees
          return detail::to_fp16(std::fma(double{detail::fp16_of(a, i)}, double{detail::fp16_of(b, i)},
                                          double{detail::fp16_of(c, i)}));
        });
  }
  static std::uint32_t e4m3x2_to_fp16x2(std::uint32_t codes) {
    return each_half([&](int i) {
      return kvfolia::fp16(
          static_cast<float>(kvfolia::fp8_e4m3::from_bits(static_cast<std::uint8_t>(codes >> 8 * i))));
    });
  }
  static std::uint32_t pack_fp16x2(float first, float second) {
    return each_half([&](int i) { return kvfolia::fp16(i == 0 ? first : second); });
  }
  static std::uint32_t pack_bf16x2(float first, float second) {
    return each_half([&](int i) { return kvfolia::bf16(i == 0 ? first : second); });
  }
  static float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
  static float exp2(float x) { return flush(std::exp2(flush(x))); }
  static float log2(float x) { return flush(std::log2(flush(x))); }
  static float reciprocal(float x) { return flush(1.0f / flush(x)); }
  static float max(float a, float b) { return std::fmax(a, b); }

  /// To be called at a thread's end.
  void finish(Site site = Site::here()) {
    if (!open_.empty()) return fail(site, "ends with copies that were not committed");
    for (const auto& group : groups_)
      if (!group.empty()) return fail(group.front().site, "ends with a copy that was not waited for");
  }

 private:
  struct Copy {
    std::uint32_t to;
    std::uint32_t bytes;
    const void* from;  ///< null: zeros
    Site site;
  };

  void fail(Site site, const std::string& what) {
    state_->block.fail(state_->block.access(thread_, site).name() + " " + what);
  }

  void touch_global(const void* pointer, std::size_t bytes, bool write, Site site) {
    const auto number =
        static_cast<std::uint32_t>(state_->block_number * state_->config.threads + thread_ + 1);
    if (const auto fault = state_->global.touch(number, static_cast<std::uint32_t>(state_->config.threads),
                                                pointer, bytes, write))
      fail(site, "touches " + *fault);
    if (state_->config.counts_requests)
      count(site, write ? WarpRequests::Kind::write : WarpRequests::Kind::read,
            reinterpret_cast<std::uintptr_t>(pointer), bytes);
  }
  void touch_shared(std::uint32_t at, std::size_t bytes, SharedMemory::Kind kind, Site site) {
    if (auto fault = state_->shared.touch(state_->block.access(thread_, site), at,
                                          static_cast<std::uint32_t>(bytes), kind))
      state_->block.fail(std::move(*fault));
    if (state_->config.counts_requests && kind != SharedMemory::Kind::copy_lands)
      count(site, WarpRequests::Kind::shared, at, bytes);
  }
  void count(Site site, WarpRequests::Kind kind, std::uint64_t address, std::size_t bytes) {
    const std::uint64_t place =
        state_->places.try_emplace({site.file, site.line}, state_->places.size()).first->second * 3 +
        static_cast<std::uint64_t>(kind);
    const std::uint32_t turn = (barriers_ << 16) + turns_[place]++;
    state_->requests.add(state_->counts, thread_, place, turn, kind, address,
                         static_cast<std::uint32_t>(bytes));
  }

  template <class Argument, class Together>
  void meet(const char* operation, Site site, Argument& argument, const Together& together) {
    state_->block.meet_warp(thread_, operation, site, &argument, [&](void* const* arguments) {
      ++state_->counts.warp_operations;
      Argument* lanes[kvfolia::cuda::warp_size];
      for (int i = 0; i < kvfolia::cuda::warp_size; ++i) lanes[i] = static_cast<Argument*>(arguments[i]);
      together(lanes);
    });
  }

  template <class T>
  T shuffle(T value, int from, const char* operation, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    struct Argument {
      T from;
      int lane;
      T to;
    } argument{value, from & (kvfolia::cuda::warp_size - 1), {}};
    meet(operation, site, argument, [](Argument* const* lanes) {
      for (int i = 0; i < kvfolia::cuda::warp_size; ++i) lanes[i]->to = lanes[lanes[i]->lane]->from;
    });
    return argument.to;
  }
  std::uint32_t votes(bool vote, const char* operation, Site site) {
    struct Argument {
      bool vote;
      std::uint32_t all;
    } argument{vote, 0};
    meet(operation, site, argument, [](Argument* const* lanes) {
      std::uint32_t all = 0;
      for (int i = 0; i < kvfolia::cuda::warp_size; ++i) all |= std::uint32_t{lanes[i]->vote} << i;
      for (int i = 0; i < kvfolia::cuda::warp_size; ++i) lanes[i]->all = all;
    });
    return argument.all;
  }

  void ldmatrix(std::uint32_t (&r)[4], std::uint32_t row, bool transposed, Site site) {
    struct Argument {
      std::uint32_t row;
      std::uint32_t* to;
    } argument{row, r};
    // As the threads' own reads: what is wrong is found where it is.
    touch_shared(row, 16, SharedMemory::Kind::read, site);
    meet(transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", site, argument, [&](Argument* const* lanes) {
      ++state_->counts.ldmatrix;
      for (int m = 0; m < 4; ++m) {
        std::uint16_t matrix[8][8];
        for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], state_->shared.at(lanes[8 * m + i]->row), 16);
        for (int lane = 0; lane < kvfolia::cuda::warp_size; ++lane) {
          lanes[lane]->to[m] = 0;
          for (int i = 0; i < 2; ++i) {
            const Element e = quarter_element(lane, i);
            lanes[lane]->to[m] |= std::uint32_t{transposed ? matrix[e.col][e.row] : matrix[e.row][e.col]}
                                  << 16 * i;
          }
        }
      }
    });
  }

  template <class Widen>
  void mma(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const char* operation,
           const Widen& widen, Site site) {
    struct Argument {
      const std::uint32_t* a;
      const std::uint32_t* b;
      float* d;
    } argument{a, b, d};
    meet(operation, site, argument, [&](Argument* const* lanes) {
      ++state_->counts.mma;
      float left[16][16], right[16][8], sums[16][8];
      each_element(8, mma_a, [&](int lane, int i, Element e) {
        left[e.row][e.col] = widen(lanes[lane]->a[i / 2], i % 2);
      });
      each_element(4, mma_b, [&](int lane, int i, Element e) {
        right[e.row][e.col] = widen(lanes[lane]->b[i / 2], i % 2);
      });
      each_element(4, mma_d, [&](int lane, int i, Element e) { sums[e.row][e.col] = lanes[lane]->d[i]; });
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
          for (int col = 0; col < 8; ++col) sums[row][col] += left[row][k] * right[k][col];
      each_element(4, mma_d, [&](int lane, int i, Element e) { lanes[lane]->d[i] = sums[e.row][e.col]; });
    });
  }

  template <class Layout, class F>
  static void each_element(int count, const Layout& layout, const F& f) {
    for (int lane = 0; lane < kvfolia::cuda::warp_size; ++lane)
      for (int i = 0; i < count; ++i) f(lane, i, layout(lane, i));
  }
  template <class F>
  static std::uint32_t each_half(const F& f) {
    return std::uint32_t{f(0).bits} | std::uint32_t{f(1).bits} << 16;
  }

  detail::BlockState* state_;
  int thread_;
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
  std::unordered_map<std::uint64_t, std::uint32_t> turns_;  ///< how often it came to a place since a barrier
  std::uint32_t barriers_ = 0;
};
static_assert(kvfolia::cuda::KernelContext<HostContext>);

/// Runs body(context) for all threads of a grid, blocks and threads in an order that the seed chooses.
/// Throws KernelFault at the first thing that a kernel must not do.
template <class Body>
Counts launch(const LaunchConfig& config, GlobalMemory& global, std::uint64_t seed, const Body& body) {
  Counts counts;
  detail::BlockState state(config, global, counts);
  global.reset();
  std::mt19937_64 random(seed);
  std::vector<int> order(static_cast<std::size_t>(config.grid.x * config.grid.y * config.grid.z));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int number : order) {
    state.block_number = number;
    state.at = {number % config.grid.x, number / config.grid.x % config.grid.y,
                number / (config.grid.x * config.grid.y)};
    state.shared.reset();
    const std::string fault = state.block.run(random(), [&](int thread) {
      HostContext context(state, thread);
      body(context);
      context.finish();
    });
    if (!fault.empty())
      throw KernelFault("block " + std::to_string(state.at.x) + ", " + std::to_string(state.at.y) + ", " +
                        std::to_string(state.at.z) + ", seed " + std::to_string(seed) + ": " + fault);
    state.requests.finish(counts);
  }
  counts.switches = state.block.switches();
  return counts;
}

}  // namespace kvfolia_tests::simt
