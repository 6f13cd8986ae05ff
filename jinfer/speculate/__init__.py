"""Speculative decoding: drafted tokens are verified in one call and never change the answer."""
