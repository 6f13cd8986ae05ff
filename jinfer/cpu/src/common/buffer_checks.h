// Shape and type checks of XLA's buffers, before a handler reads any.
#pragma once

#include <algorithm>
#include <initializer_list>

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

}  // namespace jinfer
