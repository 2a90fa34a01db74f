// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The run-time numbers of a model's cache.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

struct CacheShape {
  std::int32_t layers = 1;
  std::int32_t kv_heads = 1;
  std::int32_t page_tokens = dynamic;  ///< must be given for layouts of dynamic page size
};

}  // namespace kvfolia::inline KVF_ABI
