// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/policy.hpp"

#include <string>

#include "common/kv_cache.hpp"
#include "support/catch.hpp"

using namespace kvfolia_examples;

namespace {

std::string refusal(const std::string& name) {
  try {
    parse_policy(name);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("policy names are read as they are written") {
  const Policy plain = parse_policy("bf16");
  CHECK(plain.keys == Policy::Part{"bf16"});
  CHECK(plain.values == Policy::Part{"bf16"});
  CHECK(!plain.window);
  CHECK(!plain.mixed);
  CHECK(plain.exact_sink_pages == 0);
  const Policy all = parse_policy("int8+sink:2+window:1024,8+mixed:12.5");
  CHECK(all.keys.base == "int8");
  CHECK(all.exact_sink_pages == 2);
  CHECK(all.window == 1024);
  CHECK(all.sink_tokens == 8);
  CHECK(all.mixed == 12.5);
  CHECK(parse_policy("fp16+window:7").sink_tokens == 4);
  CHECK(parse_policy("fp32+window:1,0").sink_tokens == 0);
}

TEST_CASE("adaptors belong to the keys without a slash, to their own side with one") {
  const Policy keys = parse_policy("int4-g32+centered+rotated");
  CHECK(keys.keys == Policy::Part{"int4-g32", true, true});
  CHECK(keys.values == Policy::Part{"int4-g32"});
  CHECK(keys.parts() == "int4-g32+centered+rotated");
  CHECK(parse_policy("int4-g32+rotated+centered+sink:1").parts() == "int4-g32+centered+rotated");
  const Policy both = parse_policy("int8+centered/int4-g32+rotated+sink:1");
  CHECK(both.keys == Policy::Part{"int8", true});
  CHECK(both.values == Policy::Part{"int4-g32", false, true});
  CHECK(both.exact_sink_pages == 1);
  CHECK(both.parts() == "int8+centered/int4-g32+rotated");
  CHECK(parse_policy("int8/int8").parts() == "int8");
}

TEST_CASE("other policy names are refused with what there is") {
  for (const char* name : {"",
                           "int7",
                           "int8/int4",
                           "fp16+",
                           "fp16/",
                           "/fp16",
                           "fp16/int8/int8",
                           "fp16+sink:1/int8",
                           "fp16+window",
                           "fp16+window:",
                           "fp16+window:0",
                           "fp16+window:8,",
                           "fp16+window:8,-1",
                           "fp16+window:1e3",
                           "fp16+sink:0",
                           "fp16+sink:x",
                           "fp16+sink:1+sink:2",
                           "fp16+window:8+window:9",
                           "int8/int8+centered",
                           "int8+centered+centered",
                           "int8+sink:1+rotated",
                           "int8+mixed:101",
                           "int8+mixed:",
                           "int8+mixed:-1",
                           "fp16++sink:1",
                           "fp16+window:99999999999"}) {
    CAPTURE(name);
    CHECK(refusal(name).starts_with("policy '" + std::string(name) + "': "));
  }
  CHECK(refusal("int7").find(policy_help) != std::string::npos);
}

TEST_CASE("every policy that is listed has a cache, others are refused with the list") {
  for (const std::string& parts : instantiated_parts()) {
    CAPTURE(parts);
    const Policy policy = parse_policy(parts == "int8+mixed" ? "int8+mixed:50" : parts);
    const auto cache = make_kv_cache({1, 4, 2, 64}, {.policy = policy, .page_tokens = 64, .max_tokens = 64});
    CHECK(cache->bits_per_value() >= 4.0);
    CHECK(cache->bits_per_value() <= 32.0);
  }
  const KvOptions unknown{.policy = parse_policy("mxfp4/fp32"), .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache({1, 4, 2, 64}, unknown), kvfolia_tests::contains_text("int8+centered"));
  const KvOptions blocks{.policy = parse_policy("kivi4"), .page_tokens = 16, .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache({1, 4, 2, 64}, blocks), kvfolia_tests::contains_text("blocks of 32"));
}

TEST_CASE("head dims without kernels are refused by name") {
  const KvOptions options{.policy = parse_policy("fp16"), .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache({1, 4, 2, 80}, options), kvfolia_tests::contains_text("head dim 80"));
  CHECK(make_kv_cache({1, 4, 2, 128}, options) != nullptr);
}

TEST_CASE("page sizes that an element order cannot hold are refused by name") {
  KvOptions options{
      .policy = parse_policy("int8"), .page_tokens = 6, .order = ElementOrderName::dim, .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache({1, 4, 2, 64}, options), kvfolia_tests::contains_text("multiple of 4"));
  options.page_tokens = 8;
  CHECK(make_kv_cache({1, 4, 2, 64}, options) != nullptr);
}
