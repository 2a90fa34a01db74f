// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/kv_cache.hpp"

#include <algorithm>
#include <stdexcept>

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

std::vector<Family> families() { return {exact_family(), int8_family(), int4_family(), float_family()}; }

[[noreturn]] void refuse(const Policy& policy) {
  std::string all;
  for (const std::string& parts : instantiated_parts()) all += (all.empty() ? "" : ", ") + parts;
  throw std::invalid_argument("policy '" + policy.name + "' has no kernels here; there are " + all);
}

}  // namespace

std::vector<std::string> instantiated_parts() {
  std::vector<std::string> all;
  for (const Family& family : families()) all.insert(all.end(), family.parts.begin(), family.parts.end());
  return all;
}

void require_kernels(const Policy& policy) {
  const std::vector<std::string> all = instantiated_parts();
  if (std::find(all.begin(), all.end(), policy.parts()) == all.end()) refuse(policy);
}

std::unique_ptr<KvCache> make_kv_cache(const KvShape& shape, const KvOptions& options) {
  for (const Family& family : families())
    if (auto cache = family.make(shape, options)) return cache;
  refuse(options.policy);
}

}  // namespace kvfolia_examples
