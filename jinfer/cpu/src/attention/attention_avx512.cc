#include "attention/attention_kernels.h"

const jinfer::AttentionKernels& jinfer::attention_avx512() { return jinfer::kAttention; }
