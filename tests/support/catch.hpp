// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Catch2, version 3 or 2, by one name.

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

namespace kvfolia_tests {

#if __has_include(<catch2/catch_all.hpp>)
using Catch::Approx;
inline auto contains_text(const char* text) { return Catch::Matchers::ContainsSubstring(text); }
#else
inline auto contains_text(const char* text) { return Catch::Matchers::Contains(text); }
#endif

}  // namespace kvfolia_tests
