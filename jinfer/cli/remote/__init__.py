"""Talking to a server: what `jinfer client` does. Nothing here needs JAX."""
