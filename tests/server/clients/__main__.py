"""Tries other people's clients: `python -m tests.server.clients URL MODEL [CLIENT...]`.

It needs the clients, and neither jinfer nor pytest: a virtual environment of its own will do.
"""

import argparse
import sys

from tests.server.clients.checks import CLIENTS, Server, missing, run


def main() -> int:
    """Run each check; return 1 if a check failed that does not depend on the model's answer."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.clients")
    parser.add_argument("url", help="of the server, with /v1")
    parser.add_argument("model", help="what the server calls its model")
    parser.add_argument("clients", nargs="*", metavar="client", help=f"of {', '.join(CLIENTS)}")
    given = parser.parse_args()
    failed = 0
    for client in given.clients or CLIENTS:
        if reason := missing(client):
            print(f"{client}: skipped: {reason}")
            continue
        for check, wrong in run(client, Server(given.url, given.model)):
            word = ("model" if check.by_model else "FAILED") if wrong else "ok"
            failed += word == "FAILED"
            print(f"{client}: {check.name}: {word} {wrong}".rstrip(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
