"""Scripts for maintainers: benchmarks of kernels and programs, checks on a GPU."""
