// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// run_if_supported TARGET FEATURES PROGRAM: becomes the program where the processor has all features, a
// list with commas; else says what is missing and exits with 77. Compiled for any processor, so nothing of
// the program runs before that is known, not even its initialisers.

#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

constexpr int skipped = 77, failed = 1;

#if defined(__x86_64__)
/// A bit that __builtin_cpu_supports() of some compiler does not know. Those that need the system's support
/// for wide registers are only asked for beside AVX.
bool in_cpuid(unsigned leaf, unsigned bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(leaf, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> bit & 1u) != 0;
}

std::optional<bool> has(std::string_view feature) {
#define KVF_FEATURE(name) \
  if (feature == name) return __builtin_cpu_supports(name) != 0
  KVF_FEATURE("ssse3");
  KVF_FEATURE("sse4.1");
  KVF_FEATURE("sse4.2");
  KVF_FEATURE("popcnt");
  KVF_FEATURE("avx");
  KVF_FEATURE("avx2");
  KVF_FEATURE("fma");
  KVF_FEATURE("bmi");
  KVF_FEATURE("bmi2");
  KVF_FEATURE("avx512f");
  KVF_FEATURE("avx512bw");
  KVF_FEATURE("avx512cd");
  KVF_FEATURE("avx512dq");
  KVF_FEATURE("avx512vl");
  KVF_FEATURE("avx512vnni");
  KVF_FEATURE("avx512bf16");
#undef KVF_FEATURE
  if (feature == "f16c") return in_cpuid(1, 29);
  if (feature == "movbe") return in_cpuid(1, 22);
  if (feature == "lzcnt") return in_cpuid(0x80000001u, 5);
  return std::nullopt;
}
#else
std::optional<bool> has(std::string_view) { return std::nullopt; }
#endif

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::fputs("usage: run_if_supported TARGET FEATURES PROGRAM\n", stderr), failed;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  bool supported = true;
  for (std::string_view rest = arguments[2]; !rest.empty();) {
    const std::string_view feature = rest.substr(0, rest.find(','));
    rest.remove_prefix(feature.size() == rest.size() ? rest.size() : feature.size() + 1);
    const std::optional<bool> found = has(feature);
    if (!found) return std::fprintf(stderr, "run_if_supported: unknown: %s\n", feature.data()), failed;
    if (*found) continue;
    if (supported) std::printf("skipped: %s: this processor lacks", arguments[1]);
    std::printf(" %.*s", static_cast<int>(feature.size()), feature.data());
    supported = false;
  }
  if (!supported) return std::puts(""), skipped;
  ::execl(arguments[3], arguments[3], static_cast<char*>(nullptr));
  std::perror(arguments[3]);
  return failed;
}
