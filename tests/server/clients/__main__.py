"""Tries other people's clients: `python -m tests.server.clients URL MODEL [CLIENT...]`.

It needs the clients, and neither jinfer nor pytest: a virtual environment of its own will do.
"""

import sys

from tests.server.clients.checks import CLIENTS, Server, missing, run


def main(url: str, model: str, *clients: str) -> int:
    failed = 0
    for client in clients or CLIENTS:
        if reason := missing(client):
            print(f"{client}: skipped: {reason}")
            continue
        for check, wrong in run(client, Server(url, model)):
            word = ("model" if check.by_model else "FAILED") if wrong else "ok"
            failed += word == "FAILED"
            print(f"{client}: {check.name}: {word} {wrong}".rstrip(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
