// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <algorithm>
#include <string>

#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/page/host_store.hpp"
#include "kvfolia/page/page_pool.hpp"
#include "kvfolia/page/verify.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

TEST_CASE("a page goes from free to held to retired to free") {
  PagePool pool(3);
  const PageId page = *pool.allocate();
  CHECK(page == PageId{0});
  CHECK(pool.state(page) == PageState::held);
  CHECK(pool.add_ref(page));
  CHECK(*pool.drop_ref(page) == false);
  CHECK(*pool.drop_ref(page) == true);
  CHECK(pool.state(page) == PageState::retired);
  CHECK(pool.retired_pages() == 1);
  CHECK(pool.reclaim(page));
  CHECK(pool.state(page) == PageState::free);
  CHECK(pool.free_pages() == 3);
}

TEST_CASE("freeing a page twice is an error and changes no count") {
  PagePool pool(2);
  const PageId page = *pool.allocate();
  REQUIRE(pool.drop_ref(page));
  CHECK(pool.drop_ref(page).error().code == Errc::page_not_held);
  REQUIRE(pool.reclaim(page));
  CHECK(pool.drop_ref(page).error().code == Errc::page_not_held);
  CHECK(pool.reclaim(page).error().code == Errc::page_not_held);
  CHECK(pool.add_ref(page).error().code == Errc::page_not_held);
  CHECK(pool.drop_ref(PageId{7}).error().code == Errc::page_not_held);
  CHECK(pool.drop_ref(PageId{-1}).error().code == Errc::page_not_held);
  CHECK(pool.free_pages() == 2);
  CHECK(verify_pool(pool, {}).empty());
}

TEST_CASE("an empty pool says how many pages it lacks") {
  PagePool pool(1);
  REQUIRE(pool.allocate());
  const auto none = pool.allocate();
  REQUIRE(!none);
  CHECK(none.error().code == Errc::out_of_pages);
  CHECK(none.error().missing() == 1);
}

TEST_CASE("page numbers that a table entry cannot hold are refused") {
  CHECK_THROWS_AS(PagePool(std::int64_t{TableEntry::max_pages} + 1), contract_error);
  CHECK_THROWS_AS(PagePool(-1), contract_error);
}

TEST_CASE("the verifier names what is wrong and who holds the page") {
  PagePool pool(4);
  const PageId a = *pool.allocate(), b = *pool.allocate();
  const auto report = [&](std::vector<PageHolder> holders) {
    std::string all;
    for (const std::string& line : verify_pool(pool, holders)) all += line + "\n";
    return all;
  };
  CHECK(report({{"sequence 1", {a, b}}}).empty());
  SECTION("a reference too many") {
    CHECK(report({{"sequence 1", {a, b}}, {"index", {a}}}) ==
          "page 0 (holders: sequence 1, index) counts 1 references, holders have 2\n");
  }
  SECTION("a page that nobody holds") {
    CHECK(report({{"sequence 1", {a}}}) ==
          "page 1 (holders: none) counts 1 references, holders have 0\n"
          "page 1 (holders: none) is held by nobody\n");
  }
  SECTION("a free page that somebody reads") {
    CHECK(report({{"sequence 1", {a, b, PageId{3}}}})
              .find("page 3 (holders: sequence 1) is referenced but not held") != std::string::npos);
  }
  SECTION("a page that waits for nobody") {
    REQUIRE(pool.drop_ref(b));
    CHECK(report({{"sequence 1", {a}}}) == "page 1 (holders: none) waits 0 times to be freed\n");
    CHECK(report({{"sequence 1", {a}}, {"batch 0", {b}, true}}).empty());
  }
  SECTION("a page number beyond the pool") {
    CHECK(report({{"sequence 1", {a, b, PageId{9}}}}) == "sequence 1 has page 9, the pool has 4\n");
  }
}

TEST_CASE("a store's slices do not overlap and stay inside") {
  for (const StorageOrder order : {StorageOrder::layer_major, StorageOrder::page_major}) {
    HostStore store(StoreSpec{{{48, 5}, {16, 3}}, 4, order, false});
    for (int format = 0; format < 2; ++format) {
      const std::int64_t slice = format == 0 ? 48 : 16, pages = format == 0 ? 5 : 3;
      std::vector<std::byte*> starts;
      for (int layer = 0; layer < 4; ++layer)
        for (std::int64_t page = 0; page < pages; ++page)
          starts.push_back(store.data(format, layer) + page * store.page_stride(format));
      std::sort(starts.begin(), starts.end());
      CHECK(starts.front() == store.data(format, 0));
      for (std::size_t i = 1; i < starts.size(); ++i) CHECK(starts[i] - starts[i - 1] == slice);
      CHECK(reinterpret_cast<std::uintptr_t>(store.data(format, 0)) % 64 == 0);
    }
    CHECK(store.page_stride(0) == (order == StorageOrder::layer_major ? 48 : 48 * 4));
  }
}

TEST_CASE("a page's copy carries the bytes of all layers and no others") {
  for (const StorageOrder order : {StorageOrder::layer_major, StorageOrder::page_major}) {
    HostStore store(StoreSpec{{{32, 3}}, 2, order, true});
    const auto at = [&](int layer, int page) { return store.data(0, layer) + page * store.page_stride(0); };
    for (int layer = 0; layer < 2; ++layer)
      for (int page = 0; page < 3; ++page) std::memset(at(layer, page), 10 * layer + page, 32);
    const PageCopy copy{0, PageId{1}, PageId{2}};
    store.copy({&copy, 1}, cpu::serial);
    for (int layer = 0; layer < 2; ++layer)
      for (int page = 0; page < 3; ++page)
        for (int i = 0; i < 32; ++i)
          CHECK(static_cast<int>(at(layer, page)[i]) == 10 * layer + (page == 2 ? 1 : page));
  }
}

TEST_CASE("page bytes that 64 bits cannot address are refused") {
  CHECK_THROWS_AS(HostStore(StoreSpec{{{std::int64_t{1} << 40, std::int64_t{1} << 29}}, 80}), contract_error);
}
