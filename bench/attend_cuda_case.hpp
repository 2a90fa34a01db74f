// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a library's decode attention on a GPU is given: pages [page][head][slot][128 dims], keys and values of
// a page side by side, and one query a row.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

struct CudaCase {
  static constexpr int dims = 128;
  int rows = 0;
  int length = 0;  ///< tokens of every row
  int query_heads = 0;
  int kv_heads = 0;
  int page_tokens = 0;
  std::byte* pages = nullptr;
  std::int64_t page_bytes = 0;
  std::int64_t value_offset = 0;     ///< from the beginning of a page
  std::vector<std::int32_t> indptr;  ///< [rows + 1], on the host
  const std::int32_t* device_indptr = nullptr;
  const std::int32_t* last_page_tokens = nullptr;  ///< [rows]
  const void* queries = nullptr;                   ///< fp16, [rows][query_heads][dims]
  void* out = nullptr;                             ///< fp16, as queries
};

/// A decode over a table of page numbers, [indptr.back()], which may be another one every time.
using CudaDecode = std::function<cudaError_t(const std::int32_t* table, cudaStream_t stream)>;

/// FlashInfer's, over fp16 pages, planned.
CudaDecode flashinfer_decode(const CudaCase& c);
