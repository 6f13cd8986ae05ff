"""Served models: which there are, which are in memory, and which run in their own process."""
