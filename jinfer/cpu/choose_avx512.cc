#include "choose_kernels.h"

const jinfer::ChooseKernels& jinfer::choose_avx512() { return jinfer::kChoose; }
