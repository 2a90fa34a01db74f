// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What the programs have in common besides the model: where it is, clocks, errors in one line.

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace kvfolia_examples {

inline std::string default_model() {
  const char* folder = std::getenv("KVF_MODEL_DIR");
  return (std::filesystem::path(folder ? folder : "build/model") / "SmolLM2-135M-Instruct.Q4_1.gguf")
      .string();
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Messages are one line, whatever a file or an argument holds.
inline std::string one_line(std::string message) {
  for (char& c : message)
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  return message;
}

}  // namespace kvfolia_examples
