// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Error of the attention output under every quantizer, over five kinds of keys. Real keys are not
// Gaussian: a few channels are far larger, or carry a large constant. Tolerances are those of
// tolerances.csv; its comment tells how they were found.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "quant/quant_cases.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

constexpr int dims = 128, tokens = 1024, seeds = 40;

/// Keys and values [token][dim] of a head, and the query of its last token.
struct Head {
  std::vector<float> keys, values, query;
};

/// In pairs (i, i + dims / 2), base 1e4.
void rope(std::vector<float>& keys) {
  std::vector<double> frequencies;
  for (int i = 0; i < dims / 2; ++i) frequencies.push_back(std::pow(1e4, -2.0 * i / dims));
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < dims / 2; ++i) {
      const double angle = t * frequencies[static_cast<std::size_t>(i)];
      float& a = keys[static_cast<std::size_t>(t * dims + i)];
      float& b = keys[static_cast<std::size_t>(t * dims + i + dims / 2)];
      const double x = a, y = b;
      a = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
      b = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
    }
}

/// A: Gaussian. B: 4 channels at 15 times the deviation. C: 4 channels with a bias of 15, whose signs
/// are random. D: C, then RoPE. E: 2 channels with a bias of 150, then RoPE.
///
/// The table's medians come out, for A to E, with one query a seed, and with these channels: 5, 20, 50
/// and 60, two of which RoPE turns slowly; for E two at random of the 32 that it turns slowest. With
/// others, D and E change by up to a factor of six: a bias that turns fast is a variance, which no mean
/// takes away; one that turns slowly stays a bias, which decides the scale.
Head make_head(char kind, int seed) {
  // Streams of neighbouring seeds are each other's, one number on: these must not be neighbours.
  Random random(Random(static_cast<std::uint64_t>(1000 * (kind - 'A') + seed)).next());
  const auto size = static_cast<std::size_t>(tokens * dims);
  Head head{random.gauss(size), random.gauss(size), random.gauss(dims)};
  int channels[4] = {5, 20, 50, 60};
  int count = 4;
  if (kind == 'E') {
    count = 2;
    const auto slow = [&] { return 48 + random.between(0, 15) + 64 * random.between(0, 1); };
    channels[0] = slow();
    do channels[1] = slow();
    while (channels[1] == channels[0]);
  }
  for (int c = 0; c < count && kind != 'A'; ++c) {
    const float sign = random.between(0, 1) != 0 ? 1.0f : -1.0f;
    for (int t = 0; t < tokens; ++t) {
      float& key = head.keys[static_cast<std::size_t>(t * dims + channels[c])];
      key = kind == 'B' ? 15.0f * key : key + sign * (kind == 'E' ? 150.0f : 15.0f);
    }
  }
  if (kind == 'D' || kind == 'E') rope(head.keys);
  return head;
}

/// Products of the query with all keys.
std::vector<double> scores(const scalar::Values& keys, const std::vector<float>& query) {
  std::vector<double> logits;
  for (int t = 0; t < tokens; ++t) {
    double sum = 0.0;
    for (int d = 0; d < dims; ++d)
      sum += keys[static_cast<std::size_t>(t * dims + d)] * double{query[static_cast<std::size_t>(d)]};
    logits.push_back(sum);
  }
  return logits;
}
double deviation(const std::vector<double>& x) {
  double sum = 0.0, squares = 0.0;
  for (const double v : x) sum += v;
  const double mean = sum / static_cast<double>(x.size());
  for (const double v : x) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(x.size()));
}

std::vector<double> attend(const std::vector<double>& logits, double scale, const scalar::Values& values) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> out(dims, 0.0);
  double total = 0.0;
  for (int t = 0; t < tokens; ++t) {
    const double weight = std::exp(scale * (logits[static_cast<std::size_t>(t)] - largest));
    total += weight;
    for (int d = 0; d < dims; ++d)
      out[static_cast<std::size_t>(d)] += weight * values[static_cast<std::size_t>(t * dims + d)];
  }
  for (double& v : out) v /= total;
  return out;
}

double relative_error(const std::vector<double>& x, const std::vector<double>& right) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    error += (x[i] - right[i]) * (x[i] - right[i]);
    size += right[i] * right[i];
  }
  return std::sqrt(error / size);
}

/// What `quant` makes of all rows but the last, which is the query's own and stays exact. The bytes are
/// read by the independent decoder.
template <class Quant>
scalar::Values coded(const Quant& quant, std::vector<float> rows) {
  const std::vector<float> own(rows.end() - dims, rows.end());
  for (int t = 0; t < tokens; ++t) to_stored(quant, rows.data() + t * dims, dims);
  PackedTile<Quant> packed(quant, dims, tokens);
  packed.encode(rows);
  scalar::Values values = scalar::decode(raw_format(quant), packed.raw());
  std::copy(own.begin(), own.end(), values.end() - dims);
  return values;
}

/// A quantizer, or one that takes its global scale from the rows, as the table's NVFP4 did.
template <class Quant>
const Quant& calibrated(const Quant& quant, const std::vector<float>&) {
  return quant;
}
float largest_magnitude(const std::vector<float>& rows) {
  float largest = 0.0f;
  for (const float x : rows) largest = std::max(largest, std::fabs(x));
  return largest;
}
Nvfp4 calibrated(const Nvfp4&, const std::vector<float>& rows) {
  return Nvfp4::calibrated(largest_magnitude(rows));
}
template <int Tokens>
Centered<Nvfp4, Tokens> calibrated(const Centered<Nvfp4, Tokens>&, const std::vector<float>& rows) {
  // What is left without the means is what has to be covered.
  std::vector<float> rest = rows;
  for (int first = 0; first < tokens; first += Tokens)
    for (int d = 0; d < dims; ++d) {
      double sum = 0.0;
      for (int t = first; t < first + Tokens; ++t)
        sum += double{rows[static_cast<std::size_t>(t * dims + d)]};
      for (int t = first; t < first + Tokens; ++t)
        rest[static_cast<std::size_t>(t * dims + d)] -= static_cast<float>(sum / Tokens);
    }
  return {Nvfp4::calibrated(largest_magnitude(rest))};
}

/// Percent, for every seed.
using Errors = std::vector<double>;
struct Tolerance {
  double median, p95;
};
using Cell = std::tuple<std::string, int, char>;

/// tolerances.csv, which lies beside this file.
const std::map<Cell, Tolerance>& tolerances() {
  static const std::map<Cell, Tolerance> table = [] {
    std::map<Cell, Tolerance> cells;
    const std::string source = __FILE__;
    std::ifstream file(source.substr(0, source.find_last_of('/') + 1) + "tolerances.csv");
    for (std::string line; std::getline(file, line);) {
      if (line.empty() || line[0] == '#' || line.rfind("policy,", 0) == 0) continue;
      std::istringstream fields(line);
      std::string policy, logits, kind, median, p95;
      std::getline(fields, policy, ',');
      std::getline(fields, logits, ',');
      std::getline(fields, kind, ',');
      std::getline(fields, median, ',');
      std::getline(fields, p95, ',');
      cells[{policy, std::stoi(logits), kind.at(0)}] = {std::stod(median), std::stod(p95)};
    }
    return cells;
  }();
  return table;
}

/// Of the logits.
constexpr int deviations[2] = {1, 3};

/// A head with its exact outputs, and the scales of the scores that give the logits' deviations.
struct Reference {
  Head head;
  double scales[2];
  std::vector<double> outputs[2];
};

/// All seeds of a kind, made once.
const std::vector<Reference>& references(char kind) {
  static std::map<char, std::vector<Reference>> made;
  std::vector<Reference>& all = made[kind];
  for (int seed = static_cast<int>(all.size()); seed < seeds; ++seed) {
    Reference ref{make_head(kind, seed), {}, {}};
    const scalar::Values keys(ref.head.keys.begin(), ref.head.keys.end());
    const scalar::Values values(ref.head.values.begin(), ref.head.values.end());
    const std::vector<double> exact = scores(keys, ref.head.query);
    for (int i = 0; i < 2; ++i) {
      ref.scales[i] = deviations[i] / deviation(exact);
      ref.outputs[i] = attend(exact, ref.scales[i], values);
    }
    all.push_back(std::move(ref));
  }
  return all;
}

/// For both deviations.
template <class Key, class Value>
std::vector<Errors> measure(const Key& key, const Value& value, char kind) {
  std::vector<Errors> errors(2);
  for (const Reference& ref : references(kind)) {
    const scalar::Values keys = coded(calibrated(key, ref.head.keys), ref.head.keys);
    const scalar::Values values = coded(calibrated(value, ref.head.values), ref.head.values);
    const std::vector<double> logits = scores(keys, ref.head.query);
    for (std::size_t i = 0; i < 2; ++i)
      errors[i].push_back(100.0 * relative_error(attend(logits, ref.scales[i], values), ref.outputs[i]));
  }
  return errors;
}

double median_of(Errors errors) {
  std::sort(errors.begin(), errors.end());
  const std::size_t half = errors.size() / 2;
  return errors.size() % 2 != 0 ? errors[half] : (errors[half - 1] + errors[half]) / 2;
}

/// The median of the seeds is at most the table's 95th percentile, and 95% of them are at most 1.5 times
/// that. Not all: where few weights decide, as for L = 3, single seeds are far out, in the table, too.
template <class Key, class Value>
void check_policy(const std::string& policy, const Key& key, const Value& value) {
  int cells = 0;
  for (const char kind : {'A', 'B', 'C', 'D', 'E'}) {
    const std::vector<Errors> errors = measure(key, value, kind);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto found = tolerances().find({policy, deviations[i], kind});
      if (found == tolerances().end()) continue;
      const Tolerance allowed = found->second;
      const Errors& measured = errors[i];
      const auto above = std::count_if(measured.begin(), measured.end(),
                                       [&](double error) { return !(error <= 1.5 * allowed.p95); });
      CAPTURE(policy, kind, deviations[i], allowed.median, allowed.p95, measured);
      CHECK(median_of(measured) <= allowed.p95);
      CHECK(above <= seeds / 20);
      ++cells;
    }
  }
  CHECK(cells > 0);
}
template <class Quant>
void check_policy(const std::string& policy, const Quant& quant) {
  check_policy(policy, quant, quant);
}

}  // namespace

// The heads are made once a process: few cases, since each may be one of its own.

TEST_CASE("INT8 keys err no more than their tolerance") {
  check_policy("INT8 sym per-token(128)", Int8{});
  check_policy("INT8 sym g32 (q8_0)", Int8Groups<32>{});
  check_policy("INT8 sym g32 (q8_0)", Q8_0{});
  check_policy("INT8 per-token + Hadamard", Rotated<Int8>{});
  check_policy("INT8 tok + pmean K", Centered<Int8, 64>{}, Int8{});
  check_policy("K INT8 tok / V INT4 g32", Int8{}, Int4<32>{});
}

TEST_CASE("INT4 keys err no more than their tolerance") {
  check_policy("INT4 asym g32", Int4<32>{});
  check_policy("INT4 asym g128", Int4<0>{});
  check_policy("INT4 sym g32", Int4Symmetric<32>{});
  check_policy("INT4 q4_0 g32", Q4_0{});
  check_policy("KIVI4 K/ch32 V/tok g32", Int4Channels<32>{}, Int4<32>{});
  check_policy("KIVI4 K/ch64 V/tok g64", Int4Channels<64>{}, Int4<64>{});
  // Half a bit less, by parameters of 8 bits, may cost nothing against the other rotated policy.
  check_policy("INT4 asym g32+pmean+Had K", Rotated<Compact4Channels<32>>{}, Rotated<Compact4Channels<32>>{});
  check_policy("INT4 asym g32+pmean+Had K", Rotated<Centered<Int4<32>, 64>>{}, Int4<32>{});
}

TEST_CASE("fp8 keys err no more than their tolerance") {
  check_policy("FP8 e4m3 per-token amax", Fp8<>{});
  check_policy("FP8 e4m3 scale=1", Fp8Tensor<>{});
  check_policy("FP8 e4m3 pow2 tile128", Fp8Blocks<>{});
  check_policy("FP8 tok + pmean K", Centered<Fp8<>, 64>{}, Fp8<>{});
}

TEST_CASE("fp4 keys err no more than their tolerance") {
  check_policy("NVFP4 b16 e4m3+fp32", Nvfp4{});
  check_policy("NVFP4 + pmean K", Centered<Nvfp4, 64>{}, Nvfp4{});
  check_policy("MXFP4 b32 e8m0", Mxfp4{});
}

TEST_CASE("centred INT8 stands a key bias of 150 that plain INT8 does not") {
  CHECK(median_of(measure(Centered<Int8, 64>{}, Int8{}, 'E')[0]) <= 1.3);
  CHECK(median_of(measure(Int8{}, Int8{}, 'E')[0]) > 5.0);
}
