#define UNROLL  // unrolling would only make the code longer

#include "simd/vector_portable.h"

#include "linear/linear_unpack.h"

namespace {

// Without dot products of bytes the product is compute-bound: no GEMV.
bool try_gemv(const MatmulPlan&, const Activations&, int64_t, int64_t, int64_t, float*, int64_t,
              Scratch&) {
  return false;
}

}  // namespace

#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_portable() { return kernels; }
