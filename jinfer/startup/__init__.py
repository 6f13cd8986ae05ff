"""Start-up of a process: imports, source files of cache keys, thread priorities."""
