// Terms of adapters (LoRA) fused with layers: x and the products are values of the program; other
// arguments of `jinfer_lora` are operands.
#pragma once

#include <cstdint>
#include <vector>

#include "common/operands.h"
#include "fused/fused_program.h"
#include "lora/lora_driver.h"

namespace jinfer {
namespace {

struct FusedLora {
  LoraInner inner;
  LoraSums sums;
  std::vector<size_t> ys;         // values
  size_t first_inner, first_sum;  // values; as many as ys

  template <class SizeOf>
  ffi::Error read(ProgramReader& reader, Operands& operands, int64_t rows, size_t x,
                  const SizeOf& size_of) {
    const int64_t count = reader.next();
    if (count < 1 || count > 64 || !reader.has(count))
      return refuse("a program that ends too early");
    ys.clear();
    std::vector<int64_t> sizes;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t y = reader.next();
      sizes.push_back(size_of(y)), ys.push_back(y);
      if (sizes.back() < 1) return refuse("no such value to add to");
    }
    if (size_of(x) < 1) return refuse("rows of nothing");
    ffi::Error error = inner.read(operands, count, size_of(x), rows);
    return error.failure() ? error : sums.read(operands, inner, sizes.data());
  }

  // `x_of`: a value's numbers.
  template <class ValueOf>
  void bind(const ValueOf& x_of) {
    for (size_t t = 0; t < ys.size(); ++t)
      sums.sums[t].inner = x_of(first_inner + t), sums.sums[t].y = x_of(ys[t]);
  }
};

}  // namespace
}  // namespace jinfer
