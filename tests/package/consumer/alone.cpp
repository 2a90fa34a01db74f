// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The bookkeeping alone: kvfolia::kvfolia, which has no dependency.

#include <cstdio>

#include <kvfolia/cpu/executor.hpp>
#include <kvfolia/kvfolia.hpp>

int main() {
  kvfolia::PagedCache<kvfolia::Gqa<64>, kvfolia::Int8> cache({.shape = {2, 1, kvfolia::dynamic}, .pages = 4});
  kvfolia::Step step = cache.begin_step();
  const auto id = step.create();
  if (!id || !step.extend(*id, 33)) return 1;
  const kvfolia::Batch batch = step.commit();
  cache.store().copy(batch.copies(), kvfolia::cpu::serial);
  std::printf("%lld pages held\n", static_cast<long long>(cache.stats().held));
  return cache.stats().held == 2 ? 0 : 1;
}
