#include "sample/sample_kernels.h"

const jinfer::ChooseKernels& jinfer::sample_avx512() { return jinfer::kChoose; }
