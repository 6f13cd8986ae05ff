// Operands that a handler reads in order: arguments of its call, or weights behind pointers.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>

#include "xla/ffi/api/ffi.h"

namespace jinfer {

// An array, an argument or not, with the interface of XLA's buffers.
class Operand {
 public:
  using Dimensions = xla::ffi::Span<const int64_t>;

  Operand(xla::ffi::DataType type, Dimensions dimensions, const void* data)
      : type_(type), dimensions_(dimensions), data_(data) {}
  explicit Operand(const xla::ffi::AnyBuffer& buffer)
      : Operand(buffer.element_type(), buffer.dimensions(), buffer.untyped_data()) {}

  xla::ffi::DataType element_type() const { return type_; }
  Dimensions dimensions() const { return dimensions_; }
  const void* untyped_data() const { return data_; }
  size_t element_count() const {
    return std::accumulate(dimensions_.begin(), dimensions_.end(), int64_t{1}, std::multiplies<>());
  }
  size_t size_bytes() const { return xla::ffi::ByteWidth(type_) * element_count(); }

 private:
  xla::ffi::DataType type_;
  Dimensions dimensions_;
  const void* data_;
};

// Layout of operands, in order: -1 is the next argument, -2 - i argument i again. Anything else is
// a pointer: a row of the table, the type (XLA's number), the number of axes and the axes. The
// table is uint64 [rows, 2], as words of 32 bits: address and size in bytes. With an empty layout
// all operands are arguments.
class Operands {
 public:
  // Begins at argument `next`, which is the table unless the layout is empty.
  Operands(const xla::ffi::RemainingArgs& args, size_t next,
           xla::ffi::Span<const int64_t> layout = {})
      : args_(args), next_(next), at_(layout.begin()), end_(layout.end()) {
    if (layout.size() == 0) return;
    auto table = args.get<xla::ffi::Buffer<xla::ffi::U32>>(next_++);
    if (table.has_error()) return;
    const auto shape = table->dimensions();
    if (shape.size() != 2 || shape[1] != 4) return;
    rows_ = shape[0], table_ = table->typed_data(), first_ = next_;
  }

  xla::ffi::ErrorOr<Operand> next() {
    if (at_ == end_ || *at_ < 0) {
      const int64_t which = at_ == end_ ? -1 : *at_++;
      auto buffer = args_.get<xla::ffi::AnyBuffer>(which == -1 ? next_++ : first_ - 2 - which);
      if (buffer.has_error()) return buffer.error();
      return Operand(*buffer);
    }
    const int64_t left = end_ - at_;
    if (left < 3 || at_[0] >= rows_ || at_[2] < 0 || at_[2] > left - 3) return wrong();
    uint64_t entry[2];  // address, bytes
    std::memcpy(entry, table_ + 4 * at_[0], sizeof entry);
    const Operand operand(static_cast<xla::ffi::DataType>(at_[1]),
                          {at_ + 3, static_cast<size_t>(at_[2])},
                          reinterpret_cast<const void*>(entry[0]));
    at_ += 3 + at_[2];
    return operand.size_bytes() == entry[1] ? xla::ffi::ErrorOr<Operand>(operand) : wrong();
  }

  // Whether all operands are read.
  bool done() const { return at_ == end_ && next_ == args_.size(); }

 private:
  static xla::ffi::ErrorOr<Operand> wrong() {
    return xla::ffi::Error::InvalidArgument("a weight's pointer does not fit its layout");
  }

  const xla::ffi::RemainingArgs& args_;
  size_t next_, first_ = 0;
  const int64_t *at_, *end_;
  int64_t rows_ = 0;
  const uint32_t* table_ = nullptr;
};

}  // namespace jinfer
