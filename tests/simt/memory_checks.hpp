// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What watches a block's shared memory and a launch's global memory: races, bounds, alignment, copies that
// have not landed. Checks say what is wrong; nothing here throws, for they are called on fibers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kvfolia/cuda/context.hpp"

namespace kvfolia_tests::simt {

/// A call in a kernel's body. As a default argument, the caller's.
struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  std::string name() const {
    const std::string path = file;
    return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(line);
  }
  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

/// Who, and at what time: how many barriers its block and its warp have passed.
struct Access {
  int thread = -1;  ///< of the block; -1: nobody
  std::uint32_t block_time = 0;
  std::uint32_t warp_time = 0;
  Site site{};

  int warp() const { return thread / kvfolia::cuda::warp_size; }
  /// Whether all that `later` does is behind this.
  bool before(const Access& later) const {
    return thread < 0 || thread == later.thread || block_time < later.block_time ||
           (warp() == later.warp() && warp_time < later.warp_time);
  }
  std::string name() const { return "thread " + std::to_string(thread) + " at " + site.name(); }
};

/// Shared memory with a shadow of who touched what, and when.
class SharedMemory {
 public:
  enum class Kind { read, write, copy_begins, copy_lands };

  /// Accesses are told apart by granules of so many bytes; narrower ones are refused.
  explicit SharedMemory(std::uint32_t bytes, std::uint32_t granule = 4)
      : granule_(granule), bytes_(bytes), shadow_(bytes / granule) {}

  std::byte* at(std::uint32_t offset) { return bytes_.data() + offset; }

  /// What a block finds: NaN in every format of 16 or 32 bits, and nobody's.
  void reset() {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = std::byte(i % 2 == 0 ? 0xff : 0x7f);
    std::fill(shadow_.begin(), shadow_.end(), Granule{});
  }

  /// Notes an access; gives what is wrong with it.
  std::optional<std::string> touch(const Access& access, std::uint32_t offset, std::uint32_t bytes,
                                   Kind kind) {
    if (std::size_t{offset} + bytes > bytes_.size())
      return access.name() + ": " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " of " +
             std::to_string(bytes_.size()) + " bytes of shared memory";
    if (offset % bytes != 0)
      return access.name() + ": " + std::to_string(bytes) + " bytes of shared memory at " +
             std::to_string(offset) + ", which is not aligned";
    if (bytes % granule_ != 0)
      return access.name() + ": " + std::to_string(bytes) +
             " bytes of shared memory; the check of races was told of no less than " +
             std::to_string(granule_);
    for (std::uint32_t i = offset / granule_; i < (offset + bytes) / granule_; ++i)
      if (const auto conflict = touch(shadow_[i], access, kind))
        return "race, " + *conflict + ", shared byte " + std::to_string(i * granule_);
    return {};
  }

 private:
  /// Its last writer, and up to two of those that read it since: threads that no barrier orders, of two
  /// warps where there are such. Then whoever writes without a barrier behind all readers meets one of
  /// them without a barrier between.
  struct Granule {
    Access writer{};
    Access readers[2]{};
    bool in_flight = false;
  };

  static std::optional<std::string> touch(Granule& granule, const Access& access, Kind kind) {
    const auto conflict = [&](const char* what, const Access& other) {
      return std::string(what) + ": " + access.name() + ", " + other.name();
    };
    if (kind == Kind::copy_lands) {
      granule = Granule{access, {}, false};
      return {};
    }
    if (granule.in_flight)
      return conflict(
          kind == Kind::read ? "read of a copy that has not landed" : "write over a copy that has not landed",
          granule.writer);
    if (!granule.writer.before(access))
      return conflict(kind == Kind::read ? "read after write" : "write after write", granule.writer);
    if (kind == Kind::read) {
      add_reader(granule.readers, access);
      return {};
    }
    for (const Access& reader : granule.readers)
      if (!reader.before(access)) return conflict("write after read", reader);
    granule = Granule{access, {}, kind == Kind::copy_begins};
    return {};
  }

  static void add_reader(Access (&readers)[2], const Access& access) {
    for (Access& reader : readers)
      if (reader.before(access)) {
        reader = access;
        // It may stand in for both.
        Access& other = &reader == readers ? readers[1] : readers[0];
        if (other.before(access)) other = {};
        return;
      }
    if (readers[0].warp() == readers[1].warp() && access.warp() != readers[0].warp()) readers[1] = access;
  }

  std::uint32_t granule_;
  std::vector<std::byte> bytes_;
  std::vector<Granule> shadow_;
};

/// The memory that a launch may touch, and who wrote what in it.
class GlobalMemory {
 public:
  void add(const void* begin, std::size_t bytes, const char* name, bool writable) {
    regions_.push_back({reinterpret_cast<std::uintptr_t>(begin), bytes, name,
                        std::vector<std::uint32_t>(writable ? bytes : 0)});
  }

  /// Forgets who wrote: a new launch is behind everything.
  void reset() {
    for (Region& region : regions_) std::fill(region.writers.begin(), region.writers.end(), 0u);
  }

  /// Notes an access of a thread, numbered over the grid from 1 on in blocks of `threads`; gives what is
  /// wrong with it. What a block wrote no other may read or write, what a thread wrote no other may write.
  std::optional<std::string> touch(std::uint32_t thread, std::uint32_t threads, const void* pointer,
                                   std::size_t bytes, bool write) {
    const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
    if (begin % bytes != 0) return std::to_string(bytes) + " bytes of global memory that are not aligned";
    for (Region& region : regions_) {
      if (begin < region.begin || begin + bytes > region.begin + region.bytes) continue;
      if (region.writers.empty())
        return write ? std::optional<std::string>(std::string("write to ") + region.name) : std::nullopt;
      for (std::size_t i = begin - region.begin; i < begin - region.begin + bytes; ++i) {
        std::uint32_t& writer = region.writers[i];
        const bool foreign = writer != 0 && (writer - 1) / threads != (thread - 1) / threads;
        if (foreign || (write && writer != 0 && writer != thread))
          return (write ? "second write to byte " : "read of what another block writes, byte ") +
                 std::to_string(i) + " of " + region.name;
        if (write) writer = thread;
      }
      return {};
    }
    return std::to_string(bytes) + " bytes of global memory that nobody gave the kernel";
  }

 private:
  struct Region {
    std::uintptr_t begin;
    std::size_t bytes;
    const char* name;
    std::vector<std::uint32_t> writers;  ///< a byte each, 0 is nobody; empty where nobody may write
  };
  std::vector<Region> regions_;
};

}  // namespace kvfolia_tests::simt
