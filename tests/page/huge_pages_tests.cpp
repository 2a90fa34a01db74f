// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "kvfolia/page/host_store.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

namespace {

constexpr std::int64_t mib = std::int64_t{1} << 20;

/// What the system says of the mapping that has an address.
struct Mapping {
  bool found = false;
  bool advised = false;         ///< MADV_HUGEPAGE
  std::int64_t huge_bytes = 0;  ///< of huge pages in it
};

Mapping mapping_of(const std::byte* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  Mapping mapping;
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') inside = begin <= wanted && wanted < end;
    if (!inside) continue;
    mapping.found = true;
    if (line.rfind("AnonHugePages:", 0) == 0) mapping.huge_bytes = std::stoll(line.substr(14)) * 1024;
    if (line.rfind("VmFlags:", 0) == 0) mapping.advised = (line + ' ').find(" hg ") != std::string::npos;
  }
  return mapping;
}

/// Whether the system gives huge pages to those who ask.
bool given_on_demand() {
  std::string modes;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), modes);
  return modes.find("[madvise]") != std::string::npos || modes.find("[always]") != std::string::npos;
}

bool aligned(const std::byte* address, std::int64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(alignment) == 0;
}

}  // namespace

TEST_CASE("only memory that fills a huge page is aligned to one") {
  CHECK(detail::store_alignment(0, true) == 64);
  CHECK(detail::store_alignment(4096, true) == 64);
  CHECK(detail::store_alignment(2 * mib - 1, true) == 64);
  CHECK(detail::store_alignment(2 * mib, true) == 2 * mib);
  CHECK(detail::store_alignment(1000 * mib, true) == 2 * mib);
  CHECK(detail::store_alignment(1000 * mib, false) == 64);
}

TEST_CASE("each format is aligned by its own size") {
  HostStore store(StoreSpec{{{4096, 3}, {4096, 2560}, {0, 5}}, 1, StorageOrder::layer_major, true});
  CHECK(aligned(store.data(0, 0), 64));
  CHECK(aligned(store.data(1, 0), 2 * mib));
  CHECK(store.data(2, 0) == nullptr);
  std::memset(store.data(0, 0), 1, 3 * 4096);
  std::memset(store.data(1, 0), 2, 2560 * 4096);
  CHECK(store.data(0, 0)[3 * 4096 - 1] == std::byte{1});
  CHECK(store.data(1, 0)[2560 * 4096 - 1] == std::byte{2});
}

TEST_CASE("a large store that asks for huge pages gets them where the system has some") {
  if (!given_on_demand()) {
    WARN("skipped: this system gives no huge pages on demand");
    return;
  }
  // 32 MiB and half a huge page.
  HostStore store(StoreSpec{{{mib, 33}}, 1, StorageOrder::page_major, true});
  std::byte* memory = store.data(0, 0);
  for (const std::int64_t at : {std::int64_t{0}, 16 * mib, 32 * mib - 1}) {
    const Mapping mapping = mapping_of(memory + at);
    if (!mapping.found) {
      WARN("skipped: this system does not tell what its mappings are");
      return;
    }
    CHECK(mapping.advised);
  }
  std::memset(memory, 3, static_cast<std::size_t>(33 * mib));
  if (const std::int64_t bytes = mapping_of(memory).huge_bytes; bytes < 2 * mib)
    WARN("the system had no huge page to give: its memory may be in pieces");
  else
    CHECK(bytes % (2 * mib) == 0);
}

TEST_CASE("a store that does not ask for huge pages advises nothing") {
  HostStore store(StoreSpec{{{mib, 33}}, 1, StorageOrder::page_major, false});
  CHECK(!mapping_of(store.data(0, 0)).advised);
}
