// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Opening of GGUF files: the mapping, and a parser that a bounds-checked cursor reads for.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "common/bytes.hpp"
#include "common/gguf.hpp"

namespace kvfolia_examples {
namespace {

std::string_view as_text(const std::byte* data, std::uint64_t size) {
  return {reinterpret_cast<const char*>(data), static_cast<std::size_t>(size)};
}

/// A name from a file, fit for a one-line message.
std::string quoted(std::string_view name) {
  constexpr std::size_t longest = 80;
  std::string text = "'";
  for (const char c : name.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return text + (name.size() > longest ? "...'" : "'");
}

/// Closes a descriptor on every way out.
struct Descriptor {
  int fd;
  explicit Descriptor(int opened) : fd(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

/// Reads a file front to back. `left()` bounds everything, so nothing read from the file is ever
/// added to a position before it has been compared.
class GgufFile::Parser {
 public:
  Parser(GgufFile& file, const std::byte* begin, std::size_t size)
      : file_(file), begin_(begin), size_(size) {}

  void parse() {
    if (size_ < 4 || as_text(begin_, 4) != "GGUF") file_.fail("not a GGUF file (wrong magic)");
    position_ = 4;
    const auto version = read<std::uint32_t>("the version");
    // A big-endian file's small version number has its only set bits at the far end.
    if ((version & 0xffffu) == 0 && version != 0) {
      file_.fail("big-endian GGUF files are not supported");
    }
    if (version != 2 && version != 3) {
      file_.fail("GGUF version " + std::to_string(version) + " is not supported (2 and 3 are)");
    }
    const auto tensor_count = read<std::uint64_t>("the tensor count");
    const auto value_count = read<std::uint64_t>("the metadata count");
    // The smallest key is {length, type, one byte}; the smallest tensor {length, dimension count,
    // type, offset}.
    check_count(value_count, 13, "metadata keys");
    for (std::uint64_t i = 0; i < value_count; ++i) read_value();
    check_count(tensor_count, 24, "tensors");
    for (std::uint64_t i = 0; i < tensor_count; ++i) read_tensor();
    place_tensors();
  }

 private:
  std::uint64_t left() const { return size_ - position_; }

  const std::byte* take(std::uint64_t bytes, const std::string& what) {
    if (bytes > left()) {
      file_.fail("the file ends inside " + what + " (at byte " + std::to_string(position_) + " of " +
                 std::to_string(size_) + ")");
    }
    const std::byte* taken = begin_ + position_;
    position_ += static_cast<std::size_t>(bytes);
    return taken;
  }

  template <class T>
  T read(const std::string& what) {
    return load<T>(take(sizeof(T), what));
  }

  std::string_view read_text(const std::string& what) {
    const auto length = read<std::uint64_t>(what);
    return as_text(take(length, what), length);
  }

  /// Refuses a count of things that could not fit even at their smallest.
  void check_count(std::uint64_t count, std::uint64_t smallest, const char* what) const {
    if (count > left() / smallest) {
      file_.fail("the file is too small for the " + std::to_string(count) + " " + what + " it announces");
    }
  }

  ValueType read_type(const std::string& what) {
    const auto id = read<std::uint32_t>(what);
    if (id > static_cast<std::uint32_t>(ValueType::f64)) {
      file_.fail(what + " has the unknown value type " + std::to_string(id));
    }
    return static_cast<ValueType>(id);
  }

  void read_value() {
    const std::string_view key = read_text("a metadata key");
    const std::string what = "the value of key " + quoted(key);
    Value value;
    value.type = read_type(what);
    if (value.type == ValueType::string) {
      const std::string_view text = read_text(what);
      value.count = text.size();
      value.data = begin_ + position_ - text.size();
    } else if (value.type == ValueType::array) {
      value = read_array(what, 0);
    } else {
      value.data = take(scalar_bytes(value.type), what);
      if (value.type == ValueType::boolean && load<std::uint8_t>(value.data) > 1) {
        file_.fail(what + " is a bool that is neither 0 nor 1");
      }
    }
    if (!file_.values_.emplace(key, value).second) {
      file_.fail("the key " + quoted(key) + " appears twice");
    }
  }

  Value read_array(const std::string& what, int depth) {
    // Arrays may nest; a file that nests them deeper than this is out to exhaust the stack.
    constexpr int deepest = 8;
    if (depth > deepest) file_.fail(what + " nests arrays too deeply");
    Value array;
    array.type = ValueType::array;
    array.element = read_type(what);
    array.count = read<std::uint64_t>(what);
    array.data = begin_ + position_;
    if (const std::size_t each = scalar_bytes(array.element); each != 0) {
      // Division keeps count * each from wrapping around.
      take(array.count > left() / each ? left() + 1 : array.count * each, what);
    } else {
      for (std::uint64_t i = 0; i < array.count; ++i) {
        if (array.element == ValueType::string) {
          read_text(what);
        } else {
          read_array(what, depth + 1);
        }
      }
    }
    return array;
  }

  void read_tensor() {
    GgufTensor tensor;
    tensor.name = std::string(read_text("a tensor's name"));
    const std::string what = "the tensor " + quoted(tensor.name);
    const auto dimensions = read<std::uint32_t>(what);
    if (dimensions > 4) file_.fail(what + " has " + std::to_string(dimensions) + " dimensions");
    std::int64_t elements = 1;
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto extent = read<std::uint64_t>(what);
      const auto room = std::numeric_limits<std::int64_t>::max() / elements;
      if (extent == 0 || extent > static_cast<std::uint64_t>(room)) {
        file_.fail(what + " has an impossible dimension of " + std::to_string(extent));
      }
      tensor.shape.push_back(static_cast<std::int64_t>(extent));
      elements *= tensor.shape.back();
    }
    tensor.type = static_cast<TensorType>(read<std::uint32_t>(what));
    const auto offset = read<std::uint64_t>(what);
    const auto [place, is_new] = file_.tensors_.emplace(tensor.name, std::move(tensor));
    if (!is_new) file_.fail(what + " appears twice");
    unplaced_.emplace_back(&place->second, offset);
  }

  /// The data begins at the first aligned byte behind the tensor list.
  void place_tensors() {
    constexpr std::string_view key = "general.alignment";
    const std::uint64_t alignment = file_.has(key) ? file_.get_u32(key) : 32;
    if (alignment == 0 || alignment % 8 != 0) {
      file_.fail("the alignment " + std::to_string(alignment) + " is not a multiple of 8");
    }
    if (unplaced_.empty()) return;
    const std::uint64_t padding = (alignment - position_ % alignment) % alignment;
    take(padding, "the padding before the tensor data");
    for (const auto& [tensor, offset] : unplaced_) place(*tensor, offset, alignment);
  }

  void place(GgufTensor& tensor, std::uint64_t offset, std::uint64_t alignment) {
    const std::string what = "the tensor " + quoted(tensor.name);
    if (offset % alignment != 0) {
      file_.fail(what + " is not aligned to " + std::to_string(alignment) + " bytes");
    }
    if (offset > left()) file_.fail(what + " lies outside the file");
    tensor.data = begin_ + position_ + offset;
    if (!is_supported(tensor.type)) return;  // an error only for whoever asks for this tensor
    try {
      tensor.row_stride = row_bytes(tensor.type, tensor.cols());
    } catch (const std::runtime_error& error) {
      file_.fail(what + ": " + error.what());
    }
    const auto rows = static_cast<std::uint64_t>(tensor.rows());
    if (rows > (left() - offset) / tensor.row_stride) file_.fail(what + " lies outside the file");
    tensor.bytes = tensor.row_stride * static_cast<std::size_t>(rows);
  }

  GgufFile& file_;
  const std::byte* begin_;
  std::size_t size_;
  std::size_t position_ = 0;
  std::vector<std::pair<GgufTensor*, std::uint64_t>> unplaced_;
};

GgufFile GgufFile::open(const std::string& path) {
  const auto system_error = [&](const char* action) {
    return std::runtime_error(path + ": cannot " + action + ": " + std::strerror(errno));
  };
  // Opening must not wait for a pipe's writer; for a regular file O_NONBLOCK means nothing.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) throw system_error("open");
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) throw system_error("stat");
  if (!S_ISREG(status.st_mode)) throw std::runtime_error(path + ": not a regular file");
  // mmap refuses a length of 0.
  if (status.st_size == 0) throw std::runtime_error(path + ": the file is empty");

  const auto size = static_cast<std::size_t>(status.st_size);
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapping == MAP_FAILED) throw system_error("map");
  GgufFile result(path, static_cast<const std::byte*>(mapping), size);
  Parser(result, result.mapping_.get(), size).parse();
  return result;
}

}  // namespace kvfolia_examples
