// A fused program, a sequence of integers: its operations, and its decoder.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

// Operations, numbered as `Operation` in fused_layers.py.
enum Operation : int64_t {
  kNorm,
  kLinear,
  kAdd,
  kAddVector,
  kScale,
  kDense,
  kRotate,
  kAttention,
  kActivate,
  kMultiply,
  kHadamard,
  kLora
};

// Reads a program: operations in order, each a kind and its numbers.
class ProgramReader {
 public:
  explicit ProgramReader(xla::ffi::Span<const int64_t> program)
      : at_(program.begin()), end_(program.end()) {}

  bool done() const { return at_ >= end_; }
  bool has(int64_t count) const { return count >= 0 && end_ - at_ >= count; }
  int64_t next() { return has(1) ? *at_++ : (failed_ = true, 0); }
  float real() {
    const int32_t bits = static_cast<int32_t>(next());
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const int64_t* take(int64_t count) {
    if (!has(count)) return failed_ = true, nullptr;
    return (at_ += count) - count;
  }
  bool failed() const { return failed_; }

 private:
  const int64_t *at_, *end_;
  bool failed_ = false;
};

}  // namespace
}  // namespace jinfer
