// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Stores and batches of a device that takes its time.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/delayed_memory.hpp"
#include "support/small_caches.hpp"

using namespace kvfolia_tests;

namespace {

using DeviceStore = ResourceStore<DelayedMemory>;
using DeviceCache = PagedCache<SmallLayout, Identity<float>, KeepAll, All, DeviceStore>;
using SealingCache = PagedCache<SmallLayout, Int4Channels<4>, KeepAll, All, DeviceStore>;

template <class C>
C cache_of(const CacheConfig& config, DelayedMemory& memory) {
  auto store = DeviceStore::make(C::store_spec(config), memory, 0);
  REQUIRE(store);
  return C(config, *std::move(store));
}

constexpr UploadLimits limits{
    .rows = 4, .tokens = 24, .entries = 16, .copies = 3, .recodes = 5, .in_flight = 2};

template <class T>
std::vector<T> list(const T* data, std::int64_t count) {
  return {data, data + count};
}

}  // namespace

TEST_CASE("a device's store lays pages out as the host's does") {
  for (const StorageOrder order : {StorageOrder::layer_major, StorageOrder::page_major}) {
    DelayedMemory memory;
    const StoreSpec spec{{{48, 5}, {0, 0}, {32, 2}}, 3, order};
    {
      auto store = DeviceStore::make(spec, memory, 0);
      REQUIRE(store);
      const HostStore host(spec);
      CHECK(memory.allocated == 2);
      for (const int format : {0, 2}) {
        CHECK(store->page_stride(format) == host.page_stride(format));
        CHECK(store->page_bytes(format) == host.page_bytes(format));
        for (int layer = 0; layer < 3; ++layer)
          CHECK(store->data(format, layer) - store->data(format, 0) ==
                host.data(format, layer) - host.data(format, 0));
      }
      CHECK(store->data(1, 2) == nullptr);
      // All bytes are there, each once.
      std::vector<int> touched(static_cast<std::size_t>(48 * 5 * 3), 0);
      for (int layer = 0; layer < 3; ++layer)
        for (int page = 0; page < 5; ++page)
          for (int i = 0; i < 48; ++i) {
            const auto at =
                store->view().formats[0].slice(layer, PageId{page}) + i - store->view().formats[0].base;
            ++touched[static_cast<std::size_t>(at)];
          }
      CHECK(std::count(touched.begin(), touched.end(), 1) == 48 * 5 * 3);
      DeviceStore moved = *std::move(store);
      const DeviceStore again = std::move(moved);
      CHECK(again.data(0, 0) != nullptr);
    }
    CHECK(memory.allocated == 0);
  }
  DelayedMemory memory;
  memory.memory_fails = true;
  const auto none = DeviceStore::make({{{48, 5}}, 1}, memory, 0);
  REQUIRE(!none);
  CHECK(none.error().code == Errc::device_error);
  CHECK(none.error().needed == 2);
}

TEST_CASE("a batch comes to the device in one copy, as it is") {
  DelayedMemory memory;
  auto cache = cache_of<DeviceCache>(config(16), memory);
  auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
  REQUIRE(uploads);
  const int set_up = memory.allocations;
  Step step = cache.begin_step();
  const SeqId first = *step.create(), second = *step.create();
  REQUIRE((step.extend(first, 6) && step.extend(second, 4)));
  {
    const auto uploaded = uploads->upload(step.commit(), 0);
    REQUIRE(uploaded);
    CHECK(memory.uploads == 1);
  }
  Step next = cache.begin_step();
  const SeqId child = *next.fork(first);
  REQUIRE((next.extend(second, 3) && next.extend(child, 1)));
  Batch batch = next.commit();
  const BatchView host = batch;
  // The host's arrays move with the batch.
  const auto uploaded = uploads->upload(std::move(batch), 0);
  REQUIRE(uploaded);
  CHECK(memory.uploads == 2);
  CHECK(memory.allocations == set_up);
  memory.finish();
  const BatchView view = *uploaded;
  CHECK((uploaded->rows() == 2 && view.rows == 2));
  CHECK(uploaded->tokens() == 4);
  CHECK(list(view.query_indptr, 3) == list(host.query_indptr, 3));
  CHECK(list(view.table.indptr, 3) == list(host.table.indptr, 3));
  CHECK(list(view.table.entries, 4) == list(host.table.entries, 4));
  CHECK(list(view.entry_pos, 4) == list(host.entry_pos, 4));
  CHECK(list(view.lengths, 2) == list(host.lengths, 2));
  CHECK(list(view.query_pos, 2) == list(host.query_pos, 2));
  CHECK(list(view.slots, 4) == list(host.slots, 4));
  CHECK(view.slots != host.slots);
  REQUIRE(uploaded->copies().count == 1);
  CHECK(uploaded->copies().data[0] == uploaded->batch().copies()[0]);
  // Filled up to the limits with what kernels skip.
  const BatchView padded = uploaded->padded_view();
  CHECK(padded.rows == limits.rows);
  CHECK(list(padded.query_indptr, 5) == std::vector<std::int32_t>{0, 3, 4, 4, 4});
  CHECK(list(padded.table.indptr, 5) == std::vector<std::int32_t>{0, 2, 4, 4, 4});
  CHECK(list(padded.lengths, 4) == std::vector<std::int32_t>{7, 7, 0, 0});
  for (int token = 4; token < limits.tokens; ++token) CHECK(padded.slots[token] == -1);
  CHECK(padded.recode_count == limits.recodes);
  for (int i = 0; i < limits.recodes; ++i) CHECK(padded.recodes[i].to.absent());
  CHECK(uploaded->padded_copies().count == limits.copies);
  for (int i = 1; i < limits.copies; ++i) CHECK(uploaded->padded_copies().data[i].format == -1);
}

TEST_CASE("pages that a step gave up become free when the device is done with its batch") {
  DelayedMemory memory;
  auto cache = cache_of<DeviceCache>(config(8), memory);
  auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
  REQUIRE(uploads);
  const auto retired = [&] { return cache.stats().retired; };
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 13));
  REQUIRE(uploads->upload(step.commit(), 0));
  memory.finish();
  Step release = cache.begin_step();
  REQUIRE(release.release(id));
  {
    const auto uploaded = uploads->upload(release.commit(), 0);
    REQUIRE(uploaded);
    CHECK(retired() == 4);
    memory.finish();
    REQUIRE(uploads->collect());
    CHECK(retired() == 4);  // kernels may still be launched
  }
  REQUIRE(uploads->collect());
  CHECK(retired() == 4);
  memory.advance();
  REQUIRE(uploads->collect());
  CHECK(retired() == 0);
  CHECK(cache.stats().free == 8);
  CHECK(cache.verify().empty());
  CHECK(memory.waits == 0);
}

TEST_CASE("the host is ahead by so many batches and no more") {
  DelayedMemory memory;
  auto cache = cache_of<DeviceCache>(config(8), memory);
  auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
  REQUIRE(uploads);
  const auto next = [&](SeqId id, int tokens) {
    Step step = cache.begin_step();
    REQUIRE(step.extend(id, tokens));
    return step.commit();
  };
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  step.commit();
  REQUIRE(uploads->upload(next(id, 1), 0));
  REQUIRE(uploads->upload(next(id, 1), 0));
  Batch third = next(id, 1);
  const auto refused = uploads->upload(std::move(third), 0);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::too_many_batches);
  CHECK(refused.error().message() == "too many batches: limits.in_flight (needed 3, available 2)");
  CHECK(third.rows() == 1);  // it is still here
  memory.advance();
  REQUIRE(uploads->upload(std::move(third), 0));
  memory.finish();
  const auto too_large = [&](Batch batch, const std::string& subject) {
    const auto no = uploads->upload(std::move(batch), 0);
    REQUIRE(!no);
    CHECK(no.error().code == Errc::invalid_argument);
    CHECK(no.error().subject == subject);
    CHECK(batch.rows() > 0);
  };
  too_large(next(id, 25), "batch.tokens");
  Step many = cache.begin_step();
  for (int i = 0; i < 5; ++i) REQUIRE(many.extend(*many.create(), 0));
  too_large(many.commit(), "batch.rows");
}

TEST_CASE("a batch that the device has not read yet is not written over") {
  DelayedMemory memory;
  auto cache = cache_of<DeviceCache>(config(16), memory);
  auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
  REQUIRE(uploads);
  Step create = cache.begin_step();
  const SeqId id = *create.create();
  create.commit();
  std::vector<std::int64_t> slots;  // of a token a batch
  std::vector<const std::int64_t*> arrays;
  std::size_t oldest = 0;
  int refused = 0;
  for (int i = 0; i < 8; ++i) {
    Step step = cache.begin_step();
    REQUIRE(step.extend(id, 1));
    Batch batch = step.commit();
    const std::int64_t slot = BatchView(batch).slots[0];
    while (true) {
      const auto uploaded = uploads->upload(std::move(batch), 0);
      if (uploaded) {
        arrays.push_back(BatchView(*uploaded).slots);
        break;
      }
      REQUIRE(uploaded.error().code == Errc::too_many_batches);
      REQUIRE(refused < i);
      // The device has come as far as the oldest batch, and has its arrays.
      memory.advance();
      CHECK(*arrays[oldest] == slots[oldest]);
      ++oldest;
      ++refused;
    }
    slots.push_back(slot);
  }
  CHECK(refused == 8 - limits.in_flight);
  memory.finish();
  for (; oldest < slots.size(); ++oldest) CHECK(*arrays[oldest] == slots[oldest]);
  CHECK(memory.waits == 0);
}

TEST_CASE("an upload that fails leaves the batch where it was, and events that fail keep pages") {
  DelayedMemory memory;
  auto cache = cache_of<DeviceCache>(config(8), memory);
  {
    auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
    REQUIRE(uploads);
    Step step = cache.begin_step();
    const SeqId id = *step.create();
    REQUIRE(step.extend(id, 5));
    Batch batch = step.commit();
    memory.upload_fails = true;
    const auto no = uploads->upload(std::move(batch), 0);
    REQUIRE(!no);
    CHECK(no.error().needed == 3);
    CHECK(batch.tokens() == 5);
    memory.upload_fails = false;
    REQUIRE(uploads->upload(std::move(batch), 0));
    memory.finish();
    Step release = cache.begin_step();
    REQUIRE(release.release(id));
    memory.record_fails = true;
    REQUIRE(uploads->upload(release.commit(), 0));
    memory.finish();
    const auto lost = uploads->collect();
    REQUIRE(!lost);
    CHECK(lost.error().needed == 4);
    CHECK(cache.stats().retired == 2);
    CHECK(cache.verify().empty());
    // Whoever asks later gets it recorded: then pages wait for that.
    memory.record_fails = false;
    REQUIRE(uploads->collect());
    CHECK(cache.stats().retired == 2);
    memory.finish();
    REQUIRE(uploads->collect());
    CHECK(cache.stats().retired == 0);
    Step again = cache.begin_step();
    const SeqId other = *again.create();
    REQUIRE(again.extend(other, 5));
    Batch moved = again.commit();
    REQUIRE(uploads->upload(std::move(moved), 0));
    const auto empty = uploads->upload(std::move(moved), 0);
    REQUIRE(!empty);
    CHECK(empty.error().subject == std::string("batch (moved from)"));
    Step end = cache.begin_step();
    REQUIRE(end.release(other));
    REQUIRE(uploads->upload(end.commit(), 0));
    CHECK(cache.stats().retired == 2);
    REQUIRE(uploads->wait());
    CHECK(memory.waits == 2);
    CHECK(cache.stats().retired == 0);
  }
  DelayedMemory none;
  none.memory_fails = true;
  CHECK(!Uploads<DelayedMemory>::make(limits, none, 0));
  CHECK_THROWS_AS(Uploads<DelayedMemory>::make({.rows = -1}, memory, 0), contract_error);
  CHECK_THROWS_AS(Uploads<DelayedMemory>::make({.in_flight = 0}, memory, 0), contract_error);
}

TEST_CASE("recodes of sealed pages come to the device") {
  DelayedMemory memory;
  auto cache = cache_of<SealingCache>({.shape = {1, 1, dynamic}, .pages = 8, .exact_pages = 4}, memory);
  auto uploads = Uploads<DelayedMemory>::make(limits, memory, 0);
  REQUIRE(uploads);
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), 9));
  const auto uploaded = uploads->upload(step.commit(), 0);
  REQUIRE(uploaded);
  memory.finish();
  const BatchView view = *uploaded, host = uploaded->batch();
  REQUIRE(view.recode_count == 2);
  CHECK(list(view.recodes, 2) == list(host.recodes, 2));
}
