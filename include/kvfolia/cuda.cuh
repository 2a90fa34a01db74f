// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The umbrella of the CUDA backend: plan and attend. Needs kvfolia::cuda.

#include "kvfolia/cuda/attend.cuh"
#include "kvfolia/cuda/plan.hpp"
