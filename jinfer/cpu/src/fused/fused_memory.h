// Memory of values of fused layers: reused if no later stage reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jinfer {
namespace {

class StageMemory {
 public:
  // Forgets what was allocated; the memory itself stays for later calls.
  void clear() { slots_.clear(), end_ = 0; }

  // The offset of memory that is written to from `stage` on, and read until stage `until`.
  size_t allocate(size_t bytes, int64_t stage, int64_t until) {
    bytes = (bytes + 63) / 64 * 64;
    for (Slot& slot : slots_)
      if (slot.until < stage && slot.bytes == bytes) return slot.until = until, slot.at;
    slots_.push_back({end_, bytes, until});
    return (end_ += bytes) - bytes;
  }

  // All allocated memory, aligned to 64 bytes.
  char* buffer() {
    if (memory_.size() < end_ + 64) memory_ = std::vector<char>(end_ + 64);
    return memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
  }

 private:
  // Memory that is in use until a stage.
  struct Slot {
    size_t at, bytes;
    int64_t until;
  };

  size_t end_ = 0;  // bytes
  std::vector<Slot> slots_;
  std::vector<char> memory_;
};

}  // namespace
}  // namespace jinfer
