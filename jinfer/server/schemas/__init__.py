"""Schemas (pydantic) of requests and responses; unknown request fields are rejected."""
