"""The page at /: a chat, and what the engine does."""
