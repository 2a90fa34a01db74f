// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/policy_list.hpp"

#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace kvfolia_examples;

TEST_CASE("lists of policies are split at commas") {
  using Names = std::vector<std::string>;
  CHECK(split_policies("int8") == Names{"int8"});
  CHECK(split_policies("fp16,int8+centered/int4-g32+sink:1,kivi4") ==
        Names{"fp16", "int8+centered/int4-g32+sink:1", "kivi4"});
  CHECK(split_policies("") == Names{""});
  CHECK(split_policies(",a,") == Names{"", "a", ""});
}

TEST_CASE("a window's comma does not split") {
  using Names = std::vector<std::string>;
  CHECK(split_policies("fp16+window:8,4") == Names{"fp16+window:8,4"});
  CHECK(split_policies("fp16+window:8,4,int8+window:16,bf16") ==
        Names{"fp16+window:8,4", "int8+window:16", "bf16"});
  CHECK(split_policies("int8/int4-g32+window:8,4+sink:1,fp8") ==
        Names{"int8/int4-g32+window:8,4+sink:1", "fp8"});
  CHECK(split_policies("fp16+window:8,4,5") == Names{"fp16+window:8,4", "5"});
  CHECK(split_policies("fp16+window:,4") == Names{"fp16+window:", "4"});
  CHECK(split_policies("fp16+window:8,") == Names{"fp16+window:8", ""});
  CHECK(split_policies("fp16+sink:8,4") == Names{"fp16+sink:8", "4"});
}
