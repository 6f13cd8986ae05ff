"""From a source to what is settled before weights are read."""
