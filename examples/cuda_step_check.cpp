// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <cmath>
#include <kvfolia/ref/attend.hpp>

#include "cuda_step.hpp"

namespace kvfolia_examples {

using namespace kvfolia;

Result<double> step_error(const PagedView<StepLayout, Int8>& view, const BatchView& batch,
                          const fp16* queries, const fp16* out) {
  AttendArgs args;
  args.queries = {queries, query_row, head_dim};
  const auto expected = ref::attend(view, batch, args, query_heads);
  if (!expected) return expected.error();
  double error2 = 0.0, norm2 = 0.0;
  for (std::size_t i = 0; i < expected->out.size(); ++i) {
    const double difference = static_cast<float>(out[i]) - expected->out[i];
    error2 += difference * difference;
    norm2 += expected->out[i] * expected->out[i];
  }
  return std::sqrt(error2 / norm2);
}

}  // namespace kvfolia_examples
