// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Batches on their way through a device: their arrays brought there in one copy, their pages kept until the
// device is done with them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvfolia/cache/batch.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/memory_resource.hpp"
#include "kvfolia/page/resource_store.hpp"

namespace kvfolia::inline KVF_ABI {

/// What a batch may have at most.
struct UploadLimits {
  std::int32_t rows = 0;
  std::int32_t tokens = 0;   ///< new ones, over all rows
  std::int32_t entries = 0;  ///< of block tables, over all rows
  std::int32_t copies = 0;
  std::int32_t recodes = 0;
  int in_flight = 2;  ///< batches that the host may be ahead
};

template <MemoryResource R>
class Uploads;

/// A batch that a device reads. Movable; when it is destroyed, the pages that its step gave up become free as
/// soon as its stream has come this far, see Uploads::collect.
template <MemoryResource R>
class UploadedBatch {
 public:
  UploadedBatch(UploadedBatch&& other) noexcept
      : uploads_(std::exchange(other.uploads_, nullptr)), slot_(other.slot_) {}
  UploadedBatch& operator=(UploadedBatch&& other) noexcept {
    std::swap(uploads_, other.uploads_);
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~UploadedBatch() {
    if (uploads_) uploads_->release(slot_);
  }

  const Batch& batch() const { return uploads_->slots_[slot_].batch; }
  std::int32_t rows() const { return batch().rows(); }
  std::int32_t tokens() const { return batch().tokens(); }

  /// For kernels: every pointer is the device's.
  BatchView view() const {
    BatchView view = uploads_->view(slot_);
    view.rows = rows();
    view.recode_count = batch().view().recode_count;
    return view;
  }
  operator BatchView() const { return view(); }
  DeviceCopies copies() const {
    return {uploads_->copies(slot_), static_cast<std::int32_t>(batch().copies().size())};
  }

  /// As if the batch had all that the limits allow: rows without queries and entries, slots of -1, recodes
  /// and copies that are skipped. So all batches of a slot have the same pointers and counts, and kernels
  /// that were captured in a graph for one of them read the arrays of the next.
  BatchView padded_view() const { return uploads_->view(slot_); }
  DeviceCopies padded_copies() const { return {uploads_->copies(slot_), uploads_->limits_.copies}; }

  /// Which of the limits' in_flight places the batch has.
  int slot() const { return static_cast<int>(slot_); }

 private:
  friend class Uploads<R>;
  UploadedBatch(Uploads<R>& uploads, std::size_t slot) : uploads_(&uploads), slot_(slot) {}

  Uploads<R>* uploads_;
  std::size_t slot_;
};

/// Memory for some batches, on the host and on the device, that is used again and again: upload() and
/// collect() neither allocate nor wait. Used by the thread that writes to the cache; outlives its batches,
/// and ends before the resource. Move-only while no batch is uploaded. Not to be used, and no batch
/// destroyed, while the stream is being captured: copies and events are for every launch of a graph, not in
/// it.
template <MemoryResource R>
class Uploads {
 public:
  using Stream = typename R::Stream;

  /// What the resource says when it has no memory. Throws contract_error for negative limits, and none in
  /// flight.
  static Result<Uploads> make(const UploadLimits& limits, R& resource, Stream stream) {
    detail::require(limits.rows >= 0 && limits.tokens >= 0 && limits.entries >= 0 && limits.copies >= 0 &&
                        limits.recodes >= 0,
                    "limits must not be negative");
    detail::require(limits.in_flight > 0, "limits.in_flight must be positive");
    Uploads uploads(limits, resource, stream);
    for (int i = 0; i < limits.in_flight; ++i) {
      Slot& slot = uploads.slots_.emplace_back();
      const auto staging = resource.allocate_staging(uploads.bytes_);
      if (!staging) return staging.error();
      slot.staging = static_cast<std::byte*>(*staging);
      const auto memory = resource.allocate(uploads.bytes_, stream);
      if (!memory) return memory.error();
      slot.memory = static_cast<std::byte*>(*memory);
      const auto event = resource.create_event();
      if (!event) return event.error();
      slot.event = *event;
      slot.has_event = true;
    }
    return Result<Uploads>(std::move(uploads));
  }
  Uploads(Uploads&& other) noexcept
      : limits_(other.limits_),
        resource_(other.resource_),
        stream_(other.stream_),
        offsets_(other.offsets_),
        bytes_(other.bytes_),
        slots_(std::exchange(other.slots_, {})) {}
  Uploads& operator=(Uploads&&) = delete;
  /// Waits as wait() does.
  ~Uploads() {
    static_cast<void>(wait());
    for (Slot& slot : slots_) {
      KVF_ASSERT(slot.state != State::uploaded);
      if (slot.has_event) resource_->destroy_event(slot.event);
      if (slot.memory) resource_->deallocate(slot.memory, bytes_, stream_);
      if (slot.staging) resource_->deallocate_staging(slot.staging, bytes_);
    }
  }

  /// Brings a batch to the device, in the stream's order, by one copy. On an error the batch stays the
  /// caller's: too_many_batches when all that are in flight still are (after a collect()), invalid_argument
  /// for one beyond the limits, or what the resource says.
  Result<UploadedBatch<R>> upload(Batch&& batch, Stream stream) {
    if (auto ok = check(batch); !ok) return ok.error();
    if (auto ok = collect(); !ok) return ok.error();
    const auto slot =
        std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.state == State::free; });
    if (slot == slots_.end())
      return Error{Errc::too_many_batches, "limits.in_flight", limits_.in_flight + 1, limits_.in_flight};
    const std::size_t bytes = pack(batch, slot->staging);
    if (auto ok = resource_->upload(slot->memory, slot->staging, bytes, stream); !ok) return ok.error();
    slot->batch = std::move(batch);
    slot->stream = stream;
    slot->state = State::uploaded;
    return UploadedBatch<R>(*this, static_cast<std::size_t>(slot - slots_.begin()));
  }

  /// Ends the batches that the device is done with: their pages become free. upload() does this, too. An
  /// error is the resource's; the batches that it is about keep their pages until a later call succeeds.
  Result<> collect() {
    return each_in_flight([this](Slot& slot) { return resource_->has_passed(slot.event); });
  }
  /// The same, having waited for all batches that have been destroyed.
  Result<> wait() {
    return each_in_flight([this](Slot& slot) -> Result<bool> {
      if (auto ok = resource_->wait(slot.event); !ok) return ok.error();
      return true;
    });
  }

 private:
  friend class UploadedBatch<R>;

  enum class State : std::uint8_t { free, uploaded, in_flight };
  struct Slot {
    std::byte* staging = nullptr;
    std::byte* memory = nullptr;
    typename R::Event event{};
    bool has_event = false;
    State state = State::free;
    Stream stream{};
    Batch batch{};
    bool is_recorded = false;
  };
  /// Bytes in front of the arrays. What varies most comes last: a copy ends where that does.
  struct Offsets {
    std::size_t query_indptr, entry_indptr, lengths, query_pos, slots, copies, recodes, entry_pos, entries;
  };

  Uploads(const UploadLimits& limits, R& resource, Stream stream)
      : limits_(limits), resource_(&resource), stream_(stream) {
    const auto place = [this](std::int32_t count, std::size_t size) {
      const std::size_t at = bytes_;
      bytes_ = (at + static_cast<std::size_t>(count) * size + 15) / 16 * 16;
      return at;
    };
    offsets_.query_indptr = place(limits.rows + 1, 4);
    offsets_.entry_indptr = place(limits.rows + 1, 4);
    offsets_.lengths = place(limits.rows, 4);
    offsets_.query_pos = place(limits.rows, 4);
    offsets_.slots = place(limits.tokens, 8);
    offsets_.copies = place(limits.copies, sizeof(PageCopy));
    offsets_.recodes = place(limits.recodes, sizeof(PageRecode));
    offsets_.entry_pos = place(limits.entries, 4);
    offsets_.entries = place(limits.entries, 4);
  }

  Result<> check(const Batch& batch) const {
    const BatchView view = batch;
    if (!view.query_indptr || !view.table.indptr) return detail::bad_argument("batch (moved from)");
    const auto check = [](const char* subject, std::int64_t is, std::int64_t most) {
      return is <= most ? Result<>() : detail::bad_argument(subject, is, most);
    };
    if (auto ok = check("batch.rows", view.rows, limits_.rows); !ok) return ok;
    if (auto ok = check("batch.tokens", batch.tokens(), limits_.tokens); !ok) return ok;
    if (auto ok = check("batch.table.entries", view.table.indptr[view.rows], limits_.entries); !ok) return ok;
    if (auto ok = check("batch.copies", static_cast<std::int64_t>(batch.copies().size()), limits_.copies);
        !ok)
      return ok;
    return check("batch.recodes", view.recode_count, limits_.recodes);
  }

  /// Fills staging memory; gives the bytes that have to be copied.
  std::size_t pack(const Batch& batch, std::byte* to) const {
    const BatchView view = batch;
    const auto rows = static_cast<std::size_t>(view.rows);
    const auto entries = static_cast<std::size_t>(view.table.indptr[view.rows]);
    const auto put = [to](std::size_t at, const auto* from, std::size_t count, std::size_t limit, auto rest) {
      using T = std::remove_cvref_t<decltype(*from)>;
      T* array = reinterpret_cast<T*>(to + at);
      std::copy_n(from, count, array);
      std::fill(array + count, array + limit, static_cast<T>(rest));
    };
    const auto limit_rows = static_cast<std::size_t>(limits_.rows);
    put(offsets_.query_indptr, view.query_indptr, rows + 1, limit_rows + 1, view.query_indptr[rows]);
    put(offsets_.entry_indptr, view.table.indptr, rows + 1, limit_rows + 1, view.table.indptr[rows]);
    put(offsets_.lengths, view.lengths, rows, limit_rows, 0);
    put(offsets_.query_pos, view.query_pos, rows, limit_rows, 0);
    put(offsets_.slots, view.slots, static_cast<std::size_t>(batch.tokens()),
        static_cast<std::size_t>(limits_.tokens), -1);
    put(offsets_.copies, batch.copies().data(), batch.copies().size(),
        static_cast<std::size_t>(limits_.copies), PageCopy{-1, PageId{0}, PageId{0}});
    put(offsets_.recodes, view.recodes, static_cast<std::size_t>(view.recode_count),
        static_cast<std::size_t>(limits_.recodes), PageRecode{{}, {}, 0, 0, 0});
    put(offsets_.entry_pos, view.entry_pos, entries, entries, 0);
    put(offsets_.entries, view.table.entries, entries, entries, 0);
    return offsets_.entries + entries * 4;
  }

  /// With everything that the limits allow.
  BatchView view(std::size_t slot) const {
    const auto at = [&](std::size_t offset) { return slots_[slot].memory + offset; };
    const auto ints = [&](std::size_t offset) { return reinterpret_cast<const std::int32_t*>(at(offset)); };
    BatchView view;
    view.rows = limits_.rows;
    view.query_indptr = ints(offsets_.query_indptr);
    view.table = {ints(offsets_.entries), ints(offsets_.entry_indptr)};
    view.lengths = ints(offsets_.lengths);
    view.query_pos = ints(offsets_.query_pos);
    view.entry_pos = ints(offsets_.entry_pos);
    view.slots = reinterpret_cast<const std::int64_t*>(at(offsets_.slots));
    view.recodes = reinterpret_cast<const PageRecode*>(at(offsets_.recodes));
    view.recode_count = limits_.recodes;
    return view;
  }
  const PageCopy* copies(std::size_t slot) const {
    return reinterpret_cast<const PageCopy*>(slots_[slot].memory + offsets_.copies);
  }

  void release(std::size_t index) noexcept {
    Slot& slot = slots_[index];
    slot.state = State::in_flight;
    slot.is_recorded = resource_->record(slot.event, slot.stream).has_value();
  }

  /// Ends those of which is_done(slot); the first error of any.
  template <class IsDone>
  Result<> each_in_flight(const IsDone& is_done) {
    Result<> first;
    for (Slot& slot : slots_) {
      if (slot.state != State::in_flight) continue;
      const Result<bool> done = [&]() -> Result<bool> {
        if (!slot.is_recorded) {  // which failed when the batch was destroyed: later is as good
          if (auto ok = resource_->record(slot.event, slot.stream); !ok) return ok.error();
          slot.is_recorded = true;
        }
        return is_done(slot);
      }();
      if (!done) {
        if (first) first = done.error();
      } else if (*done) {
        slot.batch = {};
        slot.state = State::free;
      }
    }
    return first;
  }

  UploadLimits limits_;
  R* resource_;
  Stream stream_;
  Offsets offsets_{};
  std::size_t bytes_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace kvfolia::inline KVF_ABI
