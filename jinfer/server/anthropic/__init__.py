"""Anthropic's dialect: the Messages API, translated to chat requests."""
