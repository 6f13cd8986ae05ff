// A thread's memory that is kept from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jinfer {

struct Scratch {
  std::vector<float> memory;

  // So many floats, aligned; what was there before is lost.
  float* of(size_t floats) {
    if (memory.size() < floats + 16) memory.resize(floats + 16);
    uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t(63));
  }
};

}  // namespace jinfer
