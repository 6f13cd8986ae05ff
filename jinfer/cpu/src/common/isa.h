// Which instructions kernels may use. The numbers are those of ISAS in build_library.py.
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

// The best of this CPU that is not above the limit set by tests; of a library that was compiled for
// one set of instructions, this one.
Isa isa();

// Whether lines that a program fetches into the second-level cache keep this CPU from what it fetches
// by itself: a Zen 4, where both wait in the same few places.
#if defined(__x86_64__)
bool prefers_hardware_prefetch();
#else
constexpr bool prefers_hardware_prefetch() { return false; }
#endif

// Whether products of bfloat16 with bfloat16 are faster in AVX-512 BF16's pairs than in float32: on
// AMD's processors, and where somebody names these instructions. Intel's do one of them in the time of
// four in float32, which together have twice as many products (Emerald Rapids: 1.35 and 5.5 billion
// instructions a second).
#if defined(__x86_64__)
bool prefers_bf16_dot();
#endif

}  // namespace jinfer

// family_portable(), family_avx2() or family_avx512(), as isa() says; JINFER_DISPATCH_DOT: of a family that
// has kernels of its own for AVX-VNNI, AVX-512 BF16, AMX and ARM's dot products; JINFER_DISPATCH_PAIRS and
// JINFER_DISPATCH_TILES: of one that has them for AVX-512 BF16 or AMX alone, null elsewhere. JINFER_BF16 and
// JINFER_AMX: the compiler knows these, without which their kernels are not there (JINFER_DISPATCH_512).
#if defined(JINFER_BF16)
#define JINFER_DISPATCH_PAIRS(family) \
  (::jinfer::isa() == ::jinfer::Isa::avx512bf16 && ::jinfer::prefers_bf16_dot() \
       ? family##_avx512bf16()                                                      \
       : nullptr)
#define JINFER_DISPATCH_BF16(family) \
  (::jinfer::isa() == ::jinfer::Isa::avx512bf16 ? family##_avx512bf16() : JINFER_DISPATCH(family))
#else
#define JINFER_DISPATCH_PAIRS(family) nullptr
#define JINFER_DISPATCH_BF16(family) JINFER_DISPATCH(family)
#endif
#if defined(JINFER_AMX)
#define JINFER_DISPATCH_TILES(family) \
  (::jinfer::isa() == ::jinfer::Isa::amx ? family##_amx() : nullptr)
#define JINFER_DISPATCH_512(family) \
  (::jinfer::isa() == ::jinfer::Isa::amx ? family##_amx() : JINFER_DISPATCH_BF16(family))
#else
#define JINFER_DISPATCH_TILES(family) nullptr
#define JINFER_DISPATCH_512(family) JINFER_DISPATCH_BF16(family)
#endif
#define JINFER_JOINED(family, isa) family##_##isa
#define JINFER_JOIN(family, isa) JINFER_JOINED(family, isa)
#if defined(JINFER_ONLY)
#define JINFER_DISPATCH(family) JINFER_JOIN(family, JINFER_ONLY)()
#define JINFER_DISPATCH_DOT(family) JINFER_JOIN(family, JINFER_ONLY_DOT)()
#elif defined(__x86_64__)
#define JINFER_DISPATCH(family)                                                                     \
  (::jinfer::isa() >= ::jinfer::Isa::avx512 ? family##_avx512()                                 \
   : ::jinfer::isa() >= ::jinfer::Isa::avx2 ? family##_avx2()                                   \
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
