// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compiled with -march=native and KVF_CHECKED=1: see tests/CMakeLists.txt.

#define KVF_TEST_UNIT unit_b
#include "cpu/mixed_units.hpp"

Unit run_native_checked_unit() { return run_unit(); }
