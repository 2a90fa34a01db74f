// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include "attend_cases.hpp"
#include "attend_parts.hpp"

namespace kvfolia_bench {

void add_floats(Bench& bench) {
  using namespace kvfolia;
  using Half = Identity<fp16>;
  const Cases lengths = decode_cases() + prefill_cases();
  add_cases<Identity<float>>(bench, "fp32", lengths);
  add_cases<Half>(bench, "fp16", all_cases());
  add_cases<Identity<bf16>>(bench, "bf16", lengths);
  add_cases<Fp8<>>(bench, "fp8", lengths);
  add_cases<Half, 128, DimMajor<1>>(bench, "fp16", few_cases());
  add_cases<Identity<bf16>, 128, DimMajor<2>>(bench, "bf16", few_cases());
  const Cases one{{.keys = 16384}};
  add_cases<Half, 64>(bench, "fp16", one);
  add_cases<Half, 80>(bench, "fp16", one);
  add_cases<Half, 96>(bench, "fp16", one);
  add_cases<Half, 256>(bench, "fp16", one);
}

}  // namespace kvfolia_bench
