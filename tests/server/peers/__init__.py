"""What the tests of other services ask for and expect, in own words, tried on a server of jinfer.

`python -m tests.server.peers` writes the tables of README.md; with `--run` it tries
all cases first, as tests/server/test_peers.py does.
"""
