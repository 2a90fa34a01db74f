// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// encode() writes the same bytes on every machine, with every compiler and flag: those of
// golden/encode.txt. `quant_golden --write FILE` rewrites that file.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "kvfolia/core/page_format.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int8.hpp"

namespace {

using namespace kvfolia;

/// Values whose bits come from integers alone: no library function, no rounding.
std::vector<float> inputs(int count) {
  std::vector<float> values;
  std::uint64_t state = 1;
  for (int i = 0; i < count; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto mantissa = static_cast<std::uint32_t>(state >> 41);
    const std::uint32_t exponent = 115 + static_cast<std::uint32_t>(state >> 33) % 16;
    const std::uint32_t bits = (static_cast<std::uint32_t>(state >> 63) << 31) | (exponent << 23) | mantissa;
    float value;
    std::memcpy(&value, &bits, 4);
    values.push_back(value);
  }
  // Two tokens of one binade each, a token of zeros, one of tiny values, one with a NaN.
  for (int i = 0; i < 64; ++i) values[static_cast<std::size_t>(64 + i)] = 0.0f;
  for (int i = 128; i < 192; ++i) values[static_cast<std::size_t>(i)] *= 0x1p-40f;
  std::uint32_t nan = 0x7fc00000u;
  std::memcpy(&values[200], &nan, 4);
  return values;
}

std::string hex(const std::vector<std::byte>& bytes) {
  std::string text;
  char digits[3];
  for (const std::byte b : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(b));
    text += digits;
  }
  return text;
}

template <class Order, class Quant>
void encode(std::ostream& to, const char* name, const char* order) {
  constexpr int dims = 64, tokens = 8;
  const std::vector<float> values = inputs(dims * tokens);
  std::vector<std::byte> codes(static_cast<std::size_t>(detail::tile_bytes<Quant>(dims, tokens)));
  std::vector<std::byte> params(static_cast<std::size_t>(Quant::param_bytes(dims, tokens)));
  const Tile<Order, std::byte> tile{
      codes.data(), params.data(), {dims, tokens, dims}, Quant::param_bytes(dims, tokens) / tokens};
  Quant{}.encode(tile, 0, tokens, values.data());
  to << name << ' ' << order << " codes " << hex(codes) << '\n';
  if (!params.empty()) to << name << ' ' << order << " params " << hex(params) << '\n';
}

template <class Quant>
void encode_all(std::ostream& to, const char* name) {
  encode<SlotMajor, Quant>(to, name, "slot");
  encode<DimMajor<4>, Quant>(to, name, "dim4");
  encode<SlotPairs<2>, Quant>(to, name, "pairs2");
}

}  // namespace

int main(int argc, char** argv) {
  std::ostringstream text;
  text << "# SPDX-FileCopyrightText: The kvfolia authors\n# SPDX-License-Identifier: Apache-2.0 WITH "
          "LLVM-exception\n";
  encode_all<Identity<float>>(text, "fp32");
  encode_all<Identity<fp16>>(text, "fp16");
  encode_all<Identity<bf16>>(text, "bf16");
  encode_all<Int8>(text, "int8");

  if (argc == 3 && std::string(argv[1]) == "--write")
    return (std::ofstream(argv[2]) << text.str()).flush() ? 0 : 1;
  if (argc != 2) {
    std::cerr << "usage: quant_golden FILE | quant_golden --write FILE\n";
    return 2;
  }
  std::ifstream file(argv[1]);
  std::istringstream now(text.str());
  std::string expected, got;
  int line = 0;
  for (; std::getline(now, got); ++line) {
    if (!std::getline(file, expected) || expected != got) {
      std::cerr << argv[1] << ":" << line + 1 << ": encode() wrote other bytes:\n" << got << "\n";
      return 1;
    }
  }
  if (std::getline(file, expected)) {
    std::cerr << argv[1] << ":" << line + 1 << ": a line that no encode() wrote\n";
    return 1;
  }
  std::cout << "all " << line << " lines equal\n";
}
