"""Starting a process, and running compiled programs in it."""
