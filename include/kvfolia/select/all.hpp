// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Every page is read.

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

struct All {};
static_assert(SelectPolicy<All>);

}  // namespace kvfolia::inline KVF_ABI
