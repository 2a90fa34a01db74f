// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The umbrella of the CPU backend: append, plan, attend, merge and finish. Needs kvfolia::cpu.

#include "kvfolia/cpu/append.hpp"
#include "kvfolia/cpu/attend.hpp"
#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/cpu/merge.hpp"
#include "kvfolia/cpu/plan.hpp"
