#include "attention/attention_kernels.h"

const jinfer::AttentionKernels& jinfer::attention_portable() { return jinfer::kAttention; }
