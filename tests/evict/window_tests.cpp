// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <set>

#include "kvfolia/evict/keep_all.hpp"
#include "kvfolia/evict/sink_window.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

TEST_CASE("a sink window sees exactly the sinks and the last tokens, itself among them") {
  for (const int sinks : {0, 1, 4})
    for (const int window : {1, 2, 7})
      for (int query = 0; query < 30; ++query) {
        std::set<int> expected;
        for (int j = 0; j < sinks && j <= query; ++j) expected.insert(j);
        for (int j = query - window + 1; j <= query; ++j)
          if (j >= 0) expected.insert(j);
        std::set<int> seen;
        for (int j = 0; j <= query; ++j)
          if (SinkWindow{sinks, window}.visible().sees(query, j)) seen.insert(j);
        CAPTURE(sinks, window, query);
        CHECK(seen == expected);
      }
}

TEST_CASE("left counts the tokens before the query, and -1 is unlimited") {
  CHECK(Window{3, 0}.sees(10, 7));
  CHECK(!Window{3, 0}.sees(10, 6));
  CHECK(Window{0, 0}.sees(10, 10));
  CHECK(!Window{0, 0}.sees(10, 9));
  CHECK(Window{-1, 0}.sees(2'000'000'000, 0));
  CHECK(KeepAll{}.visible() == Window{});
}
