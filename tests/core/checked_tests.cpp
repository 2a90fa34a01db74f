// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What KVF_CHECKED=1 catches; this unit is always compiled with it.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <vector>

#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/identity.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

namespace {

/// Whether f ends its process by an assertion.
template <class F>
bool stops(F f) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // not the test framework's business
    ::close(STDERR_FILENO);
    f();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

}  // namespace

TEST_CASE("ids outside a view stop a checked build") {
  std::vector<float> pages(2 * 4 * 8);
  PagedView<Gqa<8, 4>, Identity<float>> view{};
  view.formats[0].keys = {reinterpret_cast<std::byte*>(pages.data()), 128, 0, 32};
  view.formats[0].pages = 2;
  CHECK(!stops([&] { static_cast<void>(view.key_tile(TableEntry{1}, 0).code<float>(3, 7)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry{2}, 0)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry{-1}, 0)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry::make(1, PageId{0}), 0)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry{0}, 1)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry{0}, 0).code<float>(4, 0)); }));
  CHECK(stops([&] { static_cast<void>(view.key_tile(TableEntry{0}, 0).code<float>(0, 8)); }));
}

TEST_CASE("a result that is not there stops a checked build") {
  const Result<int> error = Error{Errc::out_of_pages};
  const Result<int> value = 3;
  const Result<> nothing;
  CHECK(stops([&] { static_cast<void>(*error); }));
  CHECK(stops([&] { static_cast<void>(value.error()); }));
  CHECK(stops([&] { static_cast<void>(nothing.error()); }));
  CHECK(!stops([&] { static_cast<void>(*value), static_cast<void>(error.error()); }));
}
