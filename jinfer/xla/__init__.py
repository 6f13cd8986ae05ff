"""XLA's client, arrays and compiled programs as `jaxlib` has them, without JAX where that will do.

Importing JAX takes longer than all else that a start does which finds its programs made.
"""
