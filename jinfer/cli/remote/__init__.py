"""`jinfer client`: talks to an OpenAI-compatible server. Nothing here imports JAX."""
