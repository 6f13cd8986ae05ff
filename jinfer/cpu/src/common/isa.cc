#include "common/isa.h"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jinfer {
namespace {

std::atomic<int> isa_limit{static_cast<int>(Isa::neon)};

#if defined(__x86_64__)
bool has_avxvnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

bool has_bf16_and_vbmi() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 1 & 1);
}

// Whether the CPU has int8 and bfloat16 tiles and the system grants them to this process, which
// must ask: a thread's state grows by 8 KiB.
bool may_use_tiles() {
#if defined(JINFER_TILES_EMULATED)
  return true;
#elif defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  constexpr unsigned requested = 1u << 22 | 1u << 24 | 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & requested) != requested) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP, missing in old headers
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

int detect() {
#if defined(JINFER_ONLY)
  return static_cast<int>(Isa::JINFER_ONLY_DOT);  // isa.py has asked for tiles
#elif defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("f16c")) {
    return static_cast<int>(Isa::portable);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
#if defined(JINFER_AMX)
    if (has_bf16_and_vbmi() && may_use_tiles()) return static_cast<int>(Isa::amx);
#endif
#if defined(JINFER_BF16)
    if (has_bf16_and_vbmi()) return static_cast<int>(Isa::avx512bf16);
#endif
    return static_cast<int>(Isa::avx512);
  }
  return static_cast<int>(has_avxvnni() ? Isa::avxvnni : Isa::avx2);
#elif defined(__aarch64__)
  return static_cast<int>(has_dot_products() ? Isa::neon : Isa::portable);
#else
  return static_cast<int>(Isa::portable);
#endif
}

#if defined(__x86_64__)
bool is_amd() {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx &&
         d == signature_AMD_edx;
}

bool is_zen4() {
  unsigned a, b, c, d;
  if (!is_amd() || !__get_cpuid(1, &a, &b, &c, &d) || (a >> 8 & 15) + (a >> 20 & 255) != 0x19)
    return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 16 & 1);  // Zen 3 has no AVX-512
}
#endif

}  // namespace

#if defined(__x86_64__)
bool prefers_hardware_prefetch() {
  static const bool zen4 = is_zen4();
  return zen4;
}

bool prefers_bf16_dot() {
  static const bool amd = is_amd();
  return amd || isa_limit.load(std::memory_order_relaxed) == static_cast<int>(Isa::avx512bf16);
}
#endif

Isa isa() {
  static const int best = detect();
#if defined(JINFER_ONLY)
  return static_cast<Isa>(best);
#else
  const Isa found = static_cast<Isa>(std::min(best, isa_limit.load(std::memory_order_relaxed)));
#if defined(__x86_64__)
  static const bool dot = has_avxvnni();
  return found == Isa::avxvnni && !dot ? Isa::avx2 : found;
#else
  return found == Isa::neon ? found : Isa::portable;
#endif
#endif
}

}  // namespace jinfer

extern "C" __attribute__((visibility("default"))) int jinfer_isa() {
  return static_cast<int>(jinfer::isa());
}

extern "C" __attribute__((visibility("default"))) int jinfer_limit_isa(int limit) {
  return jinfer::isa_limit.exchange(limit);
}
