#include "attention_kernels.h"

const jinfer::Kernels& jinfer::attention_avx512() { return jinfer::kernels; }
