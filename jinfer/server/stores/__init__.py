"""Stores: files, batches, responses and streams that outlive their request."""
