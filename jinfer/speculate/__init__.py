"""Speculation: drafted tokens are verified together, and never change what comes out."""
