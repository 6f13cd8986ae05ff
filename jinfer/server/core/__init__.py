"""Core: one prepared request and one stream of chunks, which all dialects share."""
