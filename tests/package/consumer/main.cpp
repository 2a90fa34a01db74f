// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <cstdio>

#include <kvfolia/cpu.hpp>
#include <kvfolia/kvfolia.hpp>

int pages_of_other_unit();

int main() {
  kvfolia::PagedCache<kvfolia::Gqa<64>, kvfolia::Int8> cache({.shape = {2, 1, kvfolia::dynamic}, .pages = 4});
  kvfolia::Step step = cache.begin_step();
  const auto id = step.create();
  if (!id || !step.extend(*id, 33)) return 1;
  const kvfolia::Batch batch = step.commit();
  const auto plan = kvfolia::cpu::plan_attend(cache.view(kvfolia::LayerId{0}), batch, {.query_heads = 3});
  if (!plan || cache.stats().held != 2 || pages_of_other_unit() != 1) return 1;
  std::printf("kvfolia %d.%d.%d: %lld pages held\n", KVF_VERSION_MAJOR, KVF_VERSION_MINOR, KVF_VERSION_PATCH,
              static_cast<long long>(cache.stats().held));
}
