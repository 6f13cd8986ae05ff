"""`jinfer bench`: benchmarks that need no source tree."""
