// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: -ffast-math changes the bytes
// flags: -ffast-math

#include "kvfolia/core/config.hpp"
