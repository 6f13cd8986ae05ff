// Instruction sets that kernels are compiled for, numbered as ISAS in isa.py.
#pragma once

namespace jinfer {

enum class Isa : int {
  portable = 0,
  avx2 = 1,        // AVX2, FMA, F16C, BMI2
  avxvnni = 2,     // these and AVX-VNNI: dot products of bytes
  avx512 = 3,      // AVX-512 F, BW, VL, DQ, VNNI; not all that have it have AVX-VNNI
  avx512bf16 = 4,  // these and AVX-512 BF16 and VBMI: dot products of pairs, tables of bytes
  amx = 5,         // these and AMX: tiles of bytes and of bfloat16
  neon = 6,        // ARM's dot products of bytes; NEON alone is part of `portable` there
};

// The best instruction set of this CPU up to the limit set by tests; or the one that the library
// was compiled for.
Isa isa();

// Whether software prefetching into L2 hinders the hardware's: on a Zen 4, where both share a few
// buffers.
#if defined(__x86_64__)
bool prefers_hardware_prefetch();
#else
constexpr bool prefers_hardware_prefetch() { return false; }
#endif

// Whether AVX-512 BF16 dot products are faster than float32: on AMD's processors, or where these
// instructions were named explicitly. Intel's are slower than float32's FMA for as many products.
#if defined(__x86_64__)
bool prefers_bf16_dot();
#endif

}  // namespace jinfer

// JINFER_DISPATCH: family_portable(), family_avx2() or family_avx512(), as isa() says.
// JINFER_DISPATCH_DOT: for a family with kernels for AVX-VNNI, AVX-512 BF16, AMX and ARM's dot
// products too. JINFER_DISPATCH_TILES: for one that exists for AVX-512 BF16 and AMX alone; null
// elsewhere. JINFER_BF16 and JINFER_AMX are defined where the compiler supports these instructions.
#if defined(JINFER_BF16)
#define JINFER_DISPATCH_BF16_TILES(family)                                      \
  (::jinfer::isa() == ::jinfer::Isa::avx512bf16 && ::jinfer::prefers_bf16_dot() \
       ? family##_avx512bf16()                                                  \
       : nullptr)
#define JINFER_DISPATCH_BF16(family) \
  (::jinfer::isa() == ::jinfer::Isa::avx512bf16 ? family##_avx512bf16() : JINFER_DISPATCH(family))
#else
#define JINFER_DISPATCH_BF16_TILES(family) nullptr
#define JINFER_DISPATCH_BF16(family) JINFER_DISPATCH(family)
#endif
#if defined(JINFER_AMX)
#define JINFER_DISPATCH_TILES(family) \
  (::jinfer::isa() == ::jinfer::Isa::amx ? family##_amx() : JINFER_DISPATCH_BF16_TILES(family))
#define JINFER_DISPATCH_512(family) \
  (::jinfer::isa() == ::jinfer::Isa::amx ? family##_amx() : JINFER_DISPATCH_BF16(family))
#else
#define JINFER_DISPATCH_TILES(family) JINFER_DISPATCH_BF16_TILES(family)
#define JINFER_DISPATCH_512(family) JINFER_DISPATCH_BF16(family)
#endif
#define JINFER_JOINED(family, isa) family##_##isa
#define JINFER_JOIN(family, isa) JINFER_JOINED(family, isa)
#if defined(JINFER_ONLY)
#define JINFER_DISPATCH(family) JINFER_JOIN(family, JINFER_ONLY)()
#define JINFER_DISPATCH_DOT(family) JINFER_JOIN(family, JINFER_ONLY_DOT)()
#elif defined(__x86_64__)
#define JINFER_DISPATCH(family)                                 \
  (::jinfer::isa() >= ::jinfer::Isa::avx512 ? family##_avx512() \
   : ::jinfer::isa() >= ::jinfer::Isa::avx2 ? family##_avx2()   \
                                            : family##_portable())
#define JINFER_DISPATCH_DOT(family) \
  (::jinfer::isa() == ::jinfer::Isa::avxvnni ? family##_avxvnni() : JINFER_DISPATCH_512(family))
#elif defined(__aarch64__)
#define JINFER_DISPATCH(family) family##_portable()
#define JINFER_DISPATCH_DOT(family) \
  (::jinfer::isa() == ::jinfer::Isa::neon ? family##_neon() : family##_portable())
#else
#define JINFER_DISPATCH(family) family##_portable()
#define JINFER_DISPATCH_DOT(family) family##_portable()
#endif
