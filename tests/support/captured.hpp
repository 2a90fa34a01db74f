// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Queries, keys (after RoPE) and values of SmolLM2-135M-Instruct on the opening of "Alice's Adventures in
// Wonderland": tests/data/smollm2.fp16, which model/capture.cpp writes. For every captured layer and KV
// head: keys [token][dim], values [token][dim], queries of the last tokens [query head][token][dim];
// little-endian fp16.

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvfolia/core/fp16.hpp"

namespace kvfolia_tests {

inline constexpr int captured_layers[] = {0, 12, 29};
inline constexpr int captured_heads[] = {0, 2};
inline constexpr int captured_tokens = 256;
inline constexpr int captured_queries = 32;
inline constexpr int captured_group = 3;  ///< query heads of a KV head
inline constexpr int captured_dims = 64;

struct CapturedHead {
  int layer;
  int head;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<float> queries;
};

inline std::vector<CapturedHead> read_captured(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const auto read = [&](int count) {
    std::vector<float> numbers;
    for (int i = 0; i < count; ++i) {
      const int low = file.get(), high = file.get();
      if (!file) throw std::runtime_error(path + " is missing or too short");
      numbers.push_back(
          static_cast<float>(kvfolia::fp16::from_bits(static_cast<std::uint16_t>(low | (high << 8)))));
    }
    return numbers;
  };
  std::vector<CapturedHead> heads;
  for (const int layer : captured_layers)
    for (const int head : captured_heads)
      heads.push_back({layer, head, read(captured_tokens * captured_dims),
                       read(captured_tokens * captured_dims),
                       read(captured_group * captured_queries * captured_dims)});
  return heads;
}

}  // namespace kvfolia_tests
