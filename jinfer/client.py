"""Command-line entry point of the HTTP client: `python -m jinfer.client "..."`, or a chat."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.remote import client_flags
from jinfer.cli.remote.chat_request import CHAT, TEXT, chat_body, completion_body, stream_answer
from jinfer.cli.remote.http_client import RemoteError, ServerConnection, dicts_in
from jinfer.cli.remote.remote_chat import RemoteChat, print_reasoning
from jinfer.cli.terminal import INTERRUPTED
from jinfer.cli.terminal.chat_loop import STOPPED
from jinfer.cli.terminal.exit_status import exit_process, run_for_status
from jinfer.cli.terminal.flag_conflicts import FlagError
from jinfer.cli.terminal.generate_flags import sampling
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.engine.requests import RequestError
from jinfer.progress import task
from jinfer.template.chat_prompt import Message


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    options = client_flags.make_parser(prog_of_module(__spec__.name)).parse_args(arguments)
    try:
        return run_for_status(lambda: _run(options))
    except (RequestError, FlagError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    piped = sys.stdin is not None and not sys.stdin.isatty()
    chat = not options.question and not piped
    client_flags.check(options, chat)
    server = client_flags.server_of(options, os.environ)
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
        path, asked = TEXT, completion_body(question, sampling(options), model)
    else:
        messages: list[Message] = [*system, {"role": "user", "content": question}]
        path, asked = CHAT, chat_body(messages, sampling(options), model)
    if options.json or max(options.n or 1, options.best_of or 1) > 1:
        with task(f"waiting for {server.url}"):
            whole = server.whole(path, asked)
        if not options.json:
            return _several(whole)
        print(json.dumps(whole, ensure_ascii=False))
        return 0
    screen = WrappingWriter()
    answer = stream_answer(server, asked, screen, print_reasoning)
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
        raise RequestError("there is no question; write one, or send a text through a pipe")
    return question


def _first(server: ServerConnection) -> str:
    """The model that a server lists first."""
    names = server.models()
    if not names:
        raise RemoteError(f"{server.url}: lists no model; --model NAME says which to ask")
    return names[0]


def _several(whole: Mapping[str, Any]) -> int:
    """Prints several answers of one request."""
    choices = dicts_in(whole.get("choices"))
    for number, choice in enumerate(choices, start=1):
        if len(choices) > 1:
            print(f"--- {number} of {len(choices)}")
        print((choice.get("message") or {}).get("content") or choice.get("text") or "")
    return 0


if __name__ == "__main__":
    exit_process(main())
