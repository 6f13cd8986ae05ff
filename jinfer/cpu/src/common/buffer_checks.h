// Shape and type checks of XLA's buffers, before a handler reads any.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

// Whether a buffer has this shape.
template <class Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

// Whether a buffer has this type and shape.
template <class Buffer>
bool fits(const Buffer& buffer, xla::ffi::DataType type, std::initializer_list<int64_t> shape) {
  return buffer.element_type() == type && has_shape(buffer, shape);
}

// The element type of a buffer; false if it is none of ours.
inline bool dtype_of(xla::ffi::DataType type, DType* dtype) {
  switch (type) {
    case xla::ffi::DataType::F32: *dtype = DType::f32; return true;
    case xla::ffi::DataType::BF16: *dtype = DType::bf16; return true;
    case xla::ffi::DataType::F16: *dtype = DType::f16; return true;
    case xla::ffi::DataType::U32: *dtype = DType::quantized; return true;
    default: return false;
  }
}

// The error of a call; its handler adds the name.
inline xla::ffi::Error refuse(const std::string& what) {
  return xla::ffi::Error::InvalidArgument(what);
}

}  // namespace jinfer
