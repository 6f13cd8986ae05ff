// Element types of stored numbers.
#pragma once

namespace jinfer {

enum class DType { f32, bf16, f16, quantized, e4m3, i8 };

inline int bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::e4m3 || dtype == DType::i8 ? 1 : 2;
}

}  // namespace jinfer
