"""Command-line entry point of the HTTP client: `python -m jinfer.client "..."`, or a chat."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal import INTERRUPTED
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.cli.terminal.chat_loop import STOPPED
from jinfer.cli.terminal.exit_status import exit_process, run_for_status
from jinfer.cli.terminal.flag_conflicts import FlagError, check_pairs
from jinfer.cli.terminal.generate_flags import add_sampling, sampling
from jinfer.cli.terminal.http_client import DEFAULT_URL, RemoteError, ServerConnection, dicts_in
from jinfer.cli.terminal.remote_chat import (
    CHAT,
    TEXT,
    RemoteChat,
    chat_body,
    completion_body,
    print_reasoning,
    stream_answer,
)
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.engine.requests import RequestError
from jinfer.modelspec.foreign_names import flag_hint
from jinfer.progress import task
from jinfer.template.chat_prompt import Message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line, never a traceback."""
    options = make_parser(prog_of_module(__spec__.name)).parse_args(arguments)
    try:
        return run_for_status(lambda: _run(options))
    except (RequestError, FlagError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    piped = sys.stdin is not None and not sys.stdin.isatty()
    chat = not options.question and not piped
    check(options, chat)
    server = server_of(options, os.environ)
    question = "" if chat else _question(" ".join(options.question), piped)
    model = options.model or os.environ.get("JINFER_MODEL") or _first(server)
    system: list[Message] = []
    if options.system is not None:
        system = [{"role": "system", "content": options.system}]
    if chat:
        dialogue = RemoteChat(server, model)
        dialogue.messages, dialogue.sampling = system, sampling(options)
        dialogue.params()
        print(f"{model} at {server.url}", file=sys.stderr)
        return dialogue.run(None)
    if options.raw:
        path, body = TEXT, completion_body(question, sampling(options), model)
    else:
        messages: list[Message] = [*system, {"role": "user", "content": question}]
        path, body = CHAT, chat_body(messages, sampling(options), model)
    if options.json or max(options.n or 1, options.best_of or 1) > 1:
        with task(f"waiting for {server.url}"):
            whole = server.whole(path, body)
        if not options.json:
            return _several(whole)
        print(json.dumps(whole, ensure_ascii=False))
        return 0
    screen = WrappingWriter()
    answer = stream_answer(server, body, screen, print_reasoning)
    screen.end(STOPPED if answer.interrupted and sys.stdout.isatty() else "")
    if sys.stderr.isatty():
        print(answer.rates(), file=sys.stderr)
    return INTERRUPTED if answer.interrupted else 0


def _question(words: str, piped: bool) -> str:
    """The question: the command's words, and the text from a pipe."""
    try:
        text = sys.stdin.read() if piped else ""
        text.encode()
    except UnicodeError:
        raise RequestError("standard input: is no text in UTF-8") from None
    question = "\n\n".join(part for part in (words, text.rstrip("\n")) if part.strip())
    if not question:
        raise RequestError("there is no question; write one, or pipe a text to the command")
    return question


def _first(server: ServerConnection) -> str:
    """The model that a server lists first."""
    names = server.models()
    if not names:
        raise RemoteError(f"{server.url}: lists no model; give --model NAME")
    return names[0]


def _several(whole: Mapping[str, Any]) -> int:
    """Print several answers of one request."""
    choices = dicts_in(whole.get("choices"))
    for number, choice in enumerate(choices, start=1):
        if len(choices) > 1:
            print(f"--- {number} of {len(choices)}")
        print((choice.get("message") or {}).get("content") or choice.get("text") or "")
    return 0


_SHORT = (
    *("--url", "--api-key", "--model", "--system", "--raw", "--json", "--timeout"),
    *("--max-tokens", "--temperature", "--help"),
)
FOREIGN_FLAGS = {
    **dict.fromkeys(("-p", "--prompt"), "write the question without a flag"),
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "it is a flag of jinfer serve"),
    **dict.fromkeys(("--host", "--port"), "--url http://HOST:PORT is the address of the server"),
}


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the argument parser; flags that are not given are None."""
    parser = CliParser(
        prog=prog,
        usage="%(prog)s [QUESTION] [flags]",
        description="Sends a question to an OpenAI-compatible server. In a terminal, without a "
        "question: a chat. Piped text is appended to the question.",
        allow_abbrev=False,
        short=_SHORT,
        words="question",
        instead=lambda flag: FOREIGN_FLAGS.get(flag) or flag_hint(flag),
    )
    add = parser.add_argument
    add("question", nargs="*", help="the question; several words need no quotes")
    add(
        "--url",
        help=f"address of the server: http(s)://... or unix:/PATH (JINFER_URL; {DEFAULT_URL})",
    )
    add("--api-key", metavar="KEY", help="the API key (JINFER_API_KEY)")
    add("--model", metavar="NAME", help="one of its models (JINFER_MODEL; else its first)")
    add("--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_const", const=True, help="continue the text; no chat template")
    add("--timeout", type=_seconds, metavar="S", help="fail after so many seconds without data")
    add("--json", action="store_const", const=True, help="print the whole answer as JSON")
    add_sampling(parser)
    return parser


def check(options: argparse.Namespace, chat: bool) -> None:
    """Check that flags do not conflict. Raises `FlagError`."""
    check_pairs({name for name, value in vars(options).items() if value is not None})
    if chat and options.json:
        raise FlagError("--json needs a question")
    if chat and options.raw:
        raise FlagError("--raw needs a text to continue")
    if options.logprobs is not None and not options.json:
        raise FlagError("--logprobs needs --json, which shows them")


def server_of(options: argparse.Namespace, environment: Mapping[str, str]) -> ServerConnection:
    """Return the server to connect to; flags override the environment. Raises `RemoteError`."""
    key = options.api_key or environment.get("JINFER_API_KEY", "").partition(",")[0].strip()
    if not (key.isascii() and key.isprintable()):
        raise RemoteError("--api-key: a key has printable ASCII characters only")
    url = options.url or environment.get("JINFER_URL") or DEFAULT_URL
    return ServerConnection(url, key or None, options.timeout)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    exit_process(main())
