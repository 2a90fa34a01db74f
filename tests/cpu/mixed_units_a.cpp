// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#define KVF_TEST_UNIT unit_a
#include "cpu/mixed_units.hpp"
#include "support/catch.hpp"

Unit run_native_checked_unit();

TEST_CASE("units with other instruction sets and checks are linked without sharing a kernel") {
  const Unit a = run_unit(), b = run_native_checked_unit();
  CHECK(b.checked);
  CHECK(a.kernel != b.kernel);
  REQUIRE(a.out.size() == b.out.size());
  for (std::size_t i = 0; i < a.out.size(); ++i) CHECK(a.out[i] == b.out[i]);
}
