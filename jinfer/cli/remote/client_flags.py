"""Flags of `jinfer client`; imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from jinfer.cli.remote.http_client import DEFAULT_URL, RemoteError, ServerConnection
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.cli.terminal.flag_conflicts import FlagError, check_pairs
from jinfer.cli.terminal.generate_flags import add_sampling
from jinfer.modelspec.foreign_names import flag_hint

_SHORT = (
    *("--url", "--api-key", "--model", "--system", "--raw", "--json", "--timeout"),
    *("--max-tokens", "--temperature", "--help"),
)
_QUESTION = "write the question without a flag"
_URL = "--url http://HOST:PORT is the address of the server"
FOREIGN_FLAGS = {
    **dict.fromkeys(("-p", "--prompt"), _QUESTION),
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "it is a flag of jinfer serve"),
    **dict.fromkeys(("--host", "--port"), _URL),
}


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The argument parser; flags that are not given are None."""
    parser = CliParser(
        prog=prog,
        usage="%(prog)s [QUESTION] [flags]",
        description="Asks a server with OpenAI's interface. Without a question, in a terminal: a "
        "chat. What comes through a pipe follows the question.",
        allow_abbrev=False,
        short=_SHORT,
        words="question",
        instead=lambda flag: FOREIGN_FLAGS.get(flag) or flag_hint(flag),
    )
    add = parser.add_argument
    add("question", nargs="*", help="what to answer; several words need no quotes")
    add(
        "--url",
        help=f"where the server is: http(s)://... or unix:/PATH (JINFER_URL; {DEFAULT_URL})",
    )
    add("--api-key", metavar="KEY", help="what opens it (JINFER_API_KEY)")
    add("--model", metavar="NAME", help="which of its models (JINFER_MODEL; else its first)")
    add("--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_const", const=True, help="continue the text; no chat template")
    add("--timeout", type=_seconds, metavar="S", help="seconds that the server may be silent")
    add("--json", action="store_const", const=True, help="print the whole answer as JSON")
    add_sampling(parser)
    return parser


def check(options: argparse.Namespace, chat: bool) -> None:
    """Checks that flags do not conflict. Raises `FlagError`."""
    check_pairs({name for name, value in vars(options).items() if value is not None})
    if chat and options.json:
        raise FlagError("--json needs a question")
    if chat and options.raw:
        raise FlagError("--raw needs a text to continue")
    if options.logprobs is not None and not options.json:
        raise FlagError("--logprobs needs --json, which shows them")


def server_of(options: argparse.Namespace, environment: Mapping[str, str]) -> ServerConnection:
    """The server to connect to; flags override the environment. Raises `RemoteError`."""
    key = options.api_key or environment.get("JINFER_API_KEY", "").partition(",")[0].strip()
    if not (key.isascii() and key.isprintable()):
        raise RemoteError("--api-key: a key has letters, digits and signs of ASCII alone")
    url = options.url or environment.get("JINFER_URL") or DEFAULT_URL
    return ServerConnection(url, key or None, options.timeout)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
