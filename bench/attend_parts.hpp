// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The parts of attend_bench, apart so that compilers can work on them at once.

namespace kvfolia_bench {

class Bench;

void add_floats(Bench& bench);
void add_integers(Bench& bench);
void add_ggml(Bench& bench);

}  // namespace kvfolia_bench
