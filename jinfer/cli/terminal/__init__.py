"""`python -m jinfer.generate` in the terminal: flags, one answer, or a chat."""

INTERRUPTED = 130  # exit status of a program that Ctrl-C ended (128 + SIGINT)
