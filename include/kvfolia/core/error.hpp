// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The two ways to fail: Result for what a running engine must expect, contract_error for a caller's
// bug in a constructor.

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

enum class Errc : std::uint8_t {
  out_of_pages,         ///< needed and available in pages; Error::missing() is the difference
  unknown_sequence,     ///< the id was never given out, or its sequence was released
  position_evicted,     ///< needed: the position asked for; available: first one that can be had
  step_not_open,        ///< the step was committed, moved from, or another one was open
  pending_tokens,       ///< the sequence has tokens in this step that no kernel has written yet
  page_not_held,        ///< a reference was dropped that nobody holds
  invalid_argument,     ///< `subject` names it; needed: its value; available: the bound
  unsupported,          ///< `subject` names what no kernel here can do
  workspace_too_small,  ///< needed and available in bytes
  non_finite_input,     ///< needed: index of the token (KVF_CHECKED builds only)
  too_many_batches,     ///< as many as were asked for are in flight; needed and available in batches
  device_error,         ///< `subject` is the call that failed; needed: the device's own error number
};

constexpr const char* to_string(Errc code) {
  switch (code) {
    case Errc::out_of_pages: return "out of pages";
    case Errc::unknown_sequence: return "unknown sequence";
    case Errc::position_evicted: return "position was evicted";
    case Errc::step_not_open: return "step is not open";
    case Errc::pending_tokens: return "sequence has unwritten tokens in this step";
    case Errc::page_not_held: return "page is not held";
    case Errc::invalid_argument: return "invalid argument";
    case Errc::unsupported: return "unsupported";
    case Errc::workspace_too_small: return "workspace too small";
    case Errc::non_finite_input: return "non-finite input";
    case Errc::too_many_batches: return "too many batches";
    case Errc::device_error: return "device error";
  }
  return "unknown error";
}

/// What went wrong, and the numbers that explain it. `subject` is a string literal.
struct Error {
  Errc code;
  const char* subject = "";
  std::int64_t needed = 0;
  std::int64_t available = 0;

  std::int64_t missing() const { return needed - available; }

  std::string message() const {
    const std::string what = std::string(to_string(code)) + (*subject ? std::string(": ") + subject : "");
    if (needed == 0 && available == 0) return what;
    const bool argument = code == Errc::invalid_argument || code == Errc::unsupported;
    return what + (argument ? " (is " : " (needed ") + std::to_string(needed) +
           (argument ? ", bound " : ", available ") + std::to_string(available) + ")";
  }
};

template <class T = void>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Error error) : error_(error) {}

  explicit operator bool() const { return value_.has_value(); }
  bool has_value() const { return value_.has_value(); }
  const Error& error() const {
    KVF_ASSERT(!value_);
    return error_;
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(value()); }  // by value: nothing can dangle
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  T& value() {
    KVF_ASSERT(value_);
    return *value_;
  }
  const T& value() const {
    KVF_ASSERT(value_);
    return *value_;
  }

  std::optional<T> value_;
  Error error_{Errc::invalid_argument};
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(error) {}

  explicit operator bool() const { return !error_; }
  bool has_value() const { return !error_; }
  const Error& error() const {
    KVF_ASSERT(error_);
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

/// A constructor or configuration was given something that no run-time condition excuses.
class contract_error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {

/// Throws contract_error, or prints the message and aborts where exceptions are off.
[[noreturn]] inline void contract_failed(const std::string& message) {
#if defined(__cpp_exceptions)
  throw contract_error("kvfolia: " + message);
#else
  std::fprintf(stderr, "kvfolia: %s\n", message.c_str());
  std::abort();
#endif
}

KVF_INLINE void require(bool condition, const char* message) {
  if (!condition) contract_failed(message);
}

[[noreturn]] inline void out_of_memory() {
#if defined(__cpp_exceptions)
  throw std::bad_alloc();
#else
  contract_failed("out of memory");
#endif
}

inline Error bad_argument(const char* subject, std::int64_t needed = 0, std::int64_t available = 0) {
  return {Errc::invalid_argument, subject, needed, available};
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI
