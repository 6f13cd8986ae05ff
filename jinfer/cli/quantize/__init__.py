"""`jinfer quantize` and `jinfer rotate`: write checkpoints."""
