"""What is read or run for a stranger: regular files up to a size, and processes with bounds."""
