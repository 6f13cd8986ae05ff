#define UNROLL  // it would make the code long and no faster

#include "simd/vector_portable.h"

#include "linear/linear_unpack.h"

namespace {

// Without instructions for dot products of bytes these, not memory, are what takes time.
bool try_gemv(const MatmulPlan&, const Activations&, int64_t, int64_t, int64_t, float*, int64_t,
                  Scratch&) {
  return false;
}

}  // namespace

#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_portable() { return kernels; }
