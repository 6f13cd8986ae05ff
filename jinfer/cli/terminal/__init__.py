"""What `python -m jinfer.generate` does: its flags, one answer, a chat."""

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
