#include "sample/sample_kernels.h"

const jinfer::ChooseKernels& jinfer::sample_avx2() { return jinfer::kChoose; }
