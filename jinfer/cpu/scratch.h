// A thread's memory that is kept from call to call.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace jinfer {
namespace {

// Without a name that other files share, as std::vector's functions have: a linker would take one of
// them for all, perhaps one for instructions that the processor lacks.
struct Scratch {
  float* memory = nullptr;
  size_t size = 0;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory); }

  // So many floats, aligned; what was there before is lost.
  float* of(size_t floats) {
    if (!memory || floats > size) {
      std::free(memory);
      size = (floats + floats / 4 + 31) / 16 * 16;
      memory = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
    }
    return memory;
  }
};

}  // namespace
}  // namespace jinfer
