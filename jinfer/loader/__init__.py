"""Opening a model: from a source to all that is known before weights are loaded."""
