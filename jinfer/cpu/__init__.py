"""Custom calls for XLA:CPU, written in C++: arrays in, arrays out."""
