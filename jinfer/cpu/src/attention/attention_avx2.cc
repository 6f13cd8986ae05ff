#include "attention/attention_kernels.h"

const jinfer::AttentionKernels& jinfer::attention_avx2() { return jinfer::kAttention; }
