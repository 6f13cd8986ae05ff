#include "choose_kernels.h"

const jinfer::ChooseKernels& jinfer::choose_avx2() { return jinfer::kChoose; }
