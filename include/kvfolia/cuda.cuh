// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The umbrella of the CUDA backend: append, attend, operations on pages, memory. Needs kvfolia::cuda.

#include "kvfolia/cuda/append.cuh"
#include "kvfolia/cuda/attend.cuh"
#include "kvfolia/cuda/memory.cuh"
#include "kvfolia/cuda/page_operations.cuh"
#include "kvfolia/cuda/plan.hpp"
