"""Programs for those who work with checkpoints and on jinfer; the engine does not need them.

An installation has this folder as the package `jinfer.tools`.
"""
