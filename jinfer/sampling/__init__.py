"""Sampling: parameters of requests, the sampler, structured output."""
