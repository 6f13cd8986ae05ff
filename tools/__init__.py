"""Developer tools for checkpoints and benchmarks; the engine does not need them.

An installation has this folder as the package `jinfer.tools`.
"""
