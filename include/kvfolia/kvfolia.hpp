// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The host umbrella: caches and policies. Kernels come with the backends: kvfolia/cpu.hpp.

#include "kvfolia/cache/paged_cache.hpp"
#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/evict/keep_all.hpp"
#include "kvfolia/evict/sink_window.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/layout/mla.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/page/host_store.hpp"
#include "kvfolia/page/page_pool.hpp"
#include "kvfolia/page/verify.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/select/all.hpp"
#include "kvfolia/version.hpp"
