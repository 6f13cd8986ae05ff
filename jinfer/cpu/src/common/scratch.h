// Scratch memory of a thread, reused from call to call.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace jinfer {
namespace {

// Unlike std::vector it shares no symbol with other files: a linker keeps one definition of a
// function, perhaps one for instructions that the processor lacks.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data); }

  // Returns so many bytes, aligned; earlier content is lost.
  char* get(size_t bytes) {
    if (!data || bytes > size) {
      std::free(data);
      size = (bytes + (bytes >> 2) + 4096) & ~size_t{4095};
      data = static_cast<char*>(std::aligned_alloc(64, size));
    }
    return data;
  }
  float* of(size_t floats) { return reinterpret_cast<float*>(get(floats * sizeof(float))); }
};

}  // namespace
}  // namespace jinfer
