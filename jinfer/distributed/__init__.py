"""One model on several hosts: a process on each, of which process 0 answers and plans."""
