"""Ollama's dialect: chat, generate, embeddings and model lists, as lines of JSON."""
