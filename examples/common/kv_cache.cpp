// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/kv_cache.hpp"

#include <stdexcept>

#include "common/paged_kv_cache.hpp"

namespace kvfolia_examples {
namespace {

std::vector<Family> families() { return {exact_family(), int8_family(), int4_family(), float_family()}; }

}  // namespace

std::vector<std::string> instantiated_parts() {
  std::vector<std::string> all;
  for (const Family& family : families()) all.insert(all.end(), family.parts.begin(), family.parts.end());
  return all;
}

std::unique_ptr<KvCache> make_kv_cache(const KvShape& shape, const KvOptions& options) {
  for (const Family& family : families())
    if (auto cache = family.make(shape, options)) return cache;
  std::string all;
  for (const std::string& parts : instantiated_parts()) all += (all.empty() ? "" : ", ") + parts;
  throw std::invalid_argument("policy '" + options.policy.name + "' has no kernels here; there are " + all);
}

}  // namespace kvfolia_examples
