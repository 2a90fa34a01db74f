// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A second unit with the same headers: everything in them must be inline.

#include <kvfolia/cpu.hpp>
#include <kvfolia/kvfolia.hpp>

int pages_of_other_unit() {
  kvfolia::PagedCache<kvfolia::Gqa<64>, kvfolia::Int8> cache({.shape = {2, 1, kvfolia::dynamic}, .pages = 4});
  kvfolia::Step step = cache.begin_step();
  static_cast<void>(step.extend(*step.create(), 1));
  step.commit();
  return static_cast<int>(cache.stats().held);
}
