#include "attention_kernels.h"

const jinfer::Kernels& jinfer::attention_avx2() { return jinfer::kernels; }
