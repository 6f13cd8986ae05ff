"""Speculation put together as a specification asks: lookups, draft models, heads, their weights."""
