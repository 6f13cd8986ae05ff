"""Web page at /: a chat, and the state of the engine."""
