"""Custom calls for XLA:CPU, in C++: raw arrays in, raw arrays out."""
