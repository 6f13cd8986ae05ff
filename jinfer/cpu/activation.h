// Activation functions of feed-forwards with a gate, by number; gate.h computes them.
#pragma once

namespace jinfer {

// The numbers are those of ACTIVATIONS in linear.py.
enum class Activation : int { none = 0, silu = 1, gelu_tanh = 2, relu = 3 };

}  // namespace jinfer
