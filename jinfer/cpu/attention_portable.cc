#include "attention_kernels.h"

const jinfer::Kernels& jinfer::attention_portable() { return jinfer::kernels; }
