"""Programs for those who work with checkpoints and on jinfer; the engine does not need them."""
