// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// encode() writes the same bytes on every machine, with every compiler and flag: those of
// golden/encode.txt. `quant_golden --write FILE` rewrites that file.

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/fp4.hpp"
#include "kvfolia/quant/fp8.hpp"
#include "kvfolia/quant/ggml.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/quant/rotated.hpp"
#include "kvfolia/quant/sections.hpp"
#include "quant/golden.hpp"

namespace {

using namespace kvfolia;
using kvfolia_tests::golden_hex;
using kvfolia_tests::golden_inputs;

template <class Order, class Quant>
void encode(std::ostream& to, const char* name, const char* order, int dims, const Quant& quant) {
  constexpr int tokens = Quant::seal_tokens > 8 ? 2 * Quant::seal_tokens : 8;
  std::vector<float> values = golden_inputs(dims * tokens);
  for (int t = 0; t < tokens; ++t) to_stored(quant, &values[static_cast<std::size_t>(t * dims)], dims);
  std::vector<std::byte> codes(static_cast<std::size_t>(code_bytes<Quant>(dims) * tokens));
  std::vector<std::byte> params(static_cast<std::size_t>(Quant::param_bytes(dims, tokens)));
  const Tile<Order, std::byte> tile{
      codes.data(), params.data(),           dims,
      tokens,       code_bytes<Quant>(dims), Quant::param_bytes(dims, tokens) / tokens};
  quant.encode(tile, 0, tokens, Rows{values.data(), dims});
  to << name << ' ' << order << ' ' << dims << " codes " << golden_hex(codes) << '\n';
  if (!params.empty()) to << name << ' ' << order << ' ' << dims << " params " << golden_hex(params) << '\n';
}

/// FNV-1a over the bytes of many tiles of other values: what a compiler changes in one of a thousand.
template <class Quant>
void hash(std::ostream& to, const char* name, int dims, const Quant& quant) {
  constexpr int tokens = Quant::seal_tokens > 8 ? Quant::seal_tokens : 8;
  std::vector<std::byte> codes(static_cast<std::size_t>(code_bytes<Quant>(dims) * tokens));
  std::vector<std::byte> params(static_cast<std::size_t>(Quant::param_bytes(dims, tokens)));
  const Tile<SlotMajor, std::byte> tile{
      codes.data(), params.data(),           dims,
      tokens,       code_bytes<Quant>(dims), Quant::param_bytes(dims, tokens) / tokens};
  std::vector<float> row(static_cast<std::size_t>(dims)), values(row.size() * tokens);
  std::uint64_t state = 7, hash = 14695981039346656037ull;
  const auto next = [&state] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::int32_t>(state >> 40) - (1 << 23);
  };
  for (int n = 0; n < 64000 / tokens; ++n) {
    // Four integers added are exact, and nearly Gaussian.
    for (float& v : values)
      v = static_cast<float>(next() / 4 + next() / 4 + next() / 4 + next() / 4) * 0x1p-20f;
    for (int t = 0; t < tokens; ++t) to_stored(quant, &values[static_cast<std::size_t>(t * dims)], dims);
    quant.encode(tile, 0, tokens, Rows{values.data(), dims});
    for (const auto* bytes : {&codes, &params})
      for (const std::byte b : *bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 1099511628211ull;
  }
  to << name << " hash " << dims << ' ' << std::hex << hash << std::dec << '\n';
}

/// In slot-major order.
template <class Quant>
void encode_slots(std::ostream& to, const char* name, int dims = 64, const Quant& quant = {}) {
  encode<SlotMajor>(to, name, "slot", dims, quant);
  hash(to, name, dims, quant);
}

/// In every order that the codes allow.
template <class Quant>
void encode_all(std::ostream& to, const char* name) {
  encode_slots<Quant>(to, name);
  encode<DimMajor<4>>(to, name, "dim4", 64, Quant{});
  if constexpr (Quant::code_bits >= 8) encode<SlotPairs<2>>(to, name, "pairs2", 64, Quant{});
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
  encode_all<Int8Groups<32>>(text, "int8-g32");
  encode_all<Int4<32>>(text, "int4-g32");
  encode_slots<Int4<32>>(text, "int4-g32", 80);  // the last group is half as long
  encode_slots<Int4<0>>(text, "int4");
  encode_all<Int4Channels<32>>(text, "kivi4");
  encode_slots<Int4Channels<64>>(text, "kivi4-g64", 80);
  encode_all<Compact4Channels<32>>(text, "compact4");
  encode_slots<Rotated<Compact4Channels<16>>>(text, "compact4-g16+rotated", 80);
  encode_all<Fp8<>>(text, "fp8");
  encode_slots<Fp8<fp8_e5m2>>(text, "fp8-e5m2");
  encode_slots(text, "fp8-tensor", 64, Fp8Tensor<>::calibrated(3.0f));
  encode_slots<Fp8Blocks<>>(text, "fp8-blocks", 256);
  encode_all<Nvfp4>(text, "nvfp4");
  encode_slots(text, "nvfp4-calibrated", 64, Nvfp4::calibrated(3.0f));
  encode_all<Mxfp4>(text, "mxfp4");
  encode_slots<Q8_0>(text, "q8_0");
  encode_slots<Q4_0>(text, "q4_0");
  encode_all<Centered<Int8>>(text, "int8+centered");
  encode_slots<Rotated<Int8>>(text, "int8+rotated", 128);
  encode_slots<Rotated<Int8>>(text, "int8+rotated", 96);
  encode_slots<Rotated<Centered<Int4<32>>>>(text, "int4-g32+centered+rotated");
  // Adaptors and group sizes by their hashes alone.
  hash(text, "int4-g64", 128, Int4<64>{});
  hash(text, "int4-symmetric-g32", 96, Int4Symmetric<32>{});
  hash(text, "compact4-g64", 64, Compact4Channels<64>{});
  hash(text, "compact4+rotated", 64, Rotated<Compact4Channels<32>>{});
  hash(text, "compact4+rotated", 128, Rotated<Compact4Channels<32>>{});
  hash(text, "fp8+centered", 80, Centered<Fp8<>>{});
  hash(text, "nvfp4+centered", 64, Centered<Nvfp4>{});
  hash(text, "nvfp4+centered+rotated", 128, Rotated<Centered<Nvfp4>>{});
  hash(text, "nvfp4+rotated", 96, Rotated<Nvfp4>{});
  hash(text, "int8+centered+rotated", 256, Rotated<Centered<Int8>>{});
  hash(text, "int4-g32+rotated", 80, Rotated<Int4<32>>{});
  hash(text, "int4-g64+rotated", 128, Rotated<Int4<64>>{});
  hash(text, "kivi4+rotated", 128, Rotated<Int4Channels<32>>{});
  encode_slots<Sections<Section<Fp8Blocks<>, 128>, Section<Identity<bf16>, 64, 16>>>(text, "sections", 192);

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
