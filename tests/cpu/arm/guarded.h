// Arrays from standard input, each of which ends where memory ends.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// `bytes` before a page that may not be touched.
inline char* guarded(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
  void* at = mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) std::abort();
  char* const start = static_cast<char*>(at);
  if (mprotect(start + size, page, PROT_NONE) != 0) std::abort();
  return start + size - bytes;
}

template <class T>
T* read_array(int64_t count) {
  T* to = reinterpret_cast<T*>(guarded(count * int64_t(sizeof(T))));
  if (std::fread(to, sizeof(T), count, stdin) != static_cast<size_t>(count)) std::abort();
  return to;
}
