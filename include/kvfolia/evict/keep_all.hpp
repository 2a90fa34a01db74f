// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Nothing leaves before its sequence does.

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/mask.hpp"

namespace kvfolia::inline KVF_ABI {

struct KeepAll {
  KVF_HD constexpr Window visible() const { return {}; }
};
static_assert(EvictPolicy<KeepAll>);

}  // namespace kvfolia::inline KVF_ABI
