"""Sandbox: bounded file reads and child processes for untrusted input."""
