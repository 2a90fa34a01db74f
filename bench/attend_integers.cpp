// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include "attend_cases.hpp"
#include "attend_parts.hpp"

namespace kvfolia_bench {

void add_integers(Bench& bench) {
  using namespace kvfolia;
  using Kivi4 = KeyValue<Int4Channels<32>, Int4<32>>;
  const Cases lengths = decode_cases() + prefill_cases();
  add_cases<Int8>(bench, "int8", all_cases());
  add_cases<Int4<32>>(bench, "int4-g32", all_cases());
  add_cases<Kivi4>(bench, "kivi4", lengths);
  add_cases<Q8_0>(bench, "q8_0", few_cases());
  add_cases<Q4_0>(bench, "q4_0", few_cases());
  add_cases<Int8, 128, DimMajor<4>>(bench, "int8", few_cases() + head_cases() + page_cases());
  add_cases<Int8, 128, DimMajor<4>, SlotPairs<4>>(bench, "int8", few_cases());
  add_cases<Int4<32>, 128, DimMajor<8>>(bench, "int4-g32", few_cases() + head_cases());
  add_cases<Kivi4, 128, DimMajor<8>>(bench, "kivi4", few_cases());
  const Cases one{{.keys = 16384}};
  add_cases<Int8, 64>(bench, "int8", one);
  add_cases<Int8, 64, DimMajor<4>>(bench, "int8", one);
  add_cases<Int8, 256>(bench, "int8", one);
}

}  // namespace kvfolia_bench
