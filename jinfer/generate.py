"""The command line: `python -m jinfer.generate SOURCE --prompt "..."`, or a chat."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from jinfer.commands.program import program
from jinfer.engine.generation import Chunk, Usage
from jinfer.engine.requests import RequestError
from jinfer.errors import USER_ERRORS
from jinfer.llm import LLM
from jinfer.opening import catalogue
from jinfer.spec.files import parse_override
from jinfer.spec.resolve import merge

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "logprobs")
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.source is None and options.list is None:
        parser.error("the following arguments are required: source")
    try:
        return _run(options)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program(__spec__.name),
        description="Generates text. Without a prompt, in a terminal: a chat.",
    )
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        help="a spec (.toml), a checkpoint folder or file, package://..., hf://...",
    )
    add(
        "--list",
        nargs="?",
        const="",
        metavar="TEXT",
        help="show the models whose specs come with jinfer, or those with TEXT in their name or "
        "their family's; TEXT may be a pattern such as 'qwen*'",
    )
    add("--prompt", help="what to answer; - reads it from standard input")
    add("--ids", help='token ids to continue instead of a text, such as "1 15043"')
    add("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    add("--system", help="the system message")
    add("--chat", action="store_true", help="a conversation; a --prompt is its first message")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--json", action="store_true", help="print one JSON object with text, ids and timings")
    add("--stop", action="append", metavar="TEXT", help="a text that ends the answer")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--ignore-eos", action="store_true", help="go on after the end of sequence")
    for name, kind in [("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float)]:
        add(f"--{name}", type=kind, metavar=name.upper())
    for name in ("seed", "max-tokens", "logprobs"):
        add(f"--{name}", type=int, metavar="N")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.list is not None:
        print(catalogue.table(text=options.list))
        return 0
    prompt = _prompt(options)
    changes = _changes(options)
    overrides: dict[str, Any] = {}
    for text in options.set:
        overrides = merge(overrides, parse_override(text))
    if options.system is not None:
        overrides = merge(overrides, {"prompt": {"system": options.system}})
    if changes:
        overrides = merge(overrides, {"generation": changes})
    llm = LLM(
        options.source,
        progress=sys.stderr.isatty(),
        first=None if prompt is None else lambda llm: _asked(llm, prompt, options),
        **overrides,
    )
    if sys.stderr.isatty():
        print(llm.frontend.cache_report(), file=sys.stderr)
    if options.chat or prompt is None:
        return Chat(llm).run(prompt if isinstance(prompt, str) else None)
    return _answer(llm, _asked(llm, prompt, options), options.json)


def _prompt(options: argparse.Namespace) -> str | list[int] | None:
    """What was asked; None for a chat."""
    if options.ids is not None:
        words = options.ids.replace(",", " ").split()
        if not words or not all(word.isdecimal() for word in words):
            raise RequestError(f"--ids {options.ids!r}: write token ids, such as --ids '1 15043'")
        return [int(word) for word in words]
    piped = options.prompt is None and not sys.stdin.isatty() and not options.chat
    return sys.stdin.read() if piped or options.prompt == "-" else options.prompt


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    changes = {n: v for n in SAMPLING if (v := getattr(options, n)) is not None}
    if options.stop:
        changes["stop"] = tuple(options.stop)
    if options.greedy:
        changes["strategy"] = "greedy"
    if options.ignore_eos:
        changes["ignore_eos"] = True
    return changes


def _asked(llm: LLM, prompt: str | list[int], options: argparse.Namespace) -> list[int]:
    """The prompt's token ids: as a message where the model can chat, else as it is."""
    if isinstance(prompt, str) and not options.raw and llm.can_chat:
        return llm.encode_chat([{"role": "user", "content": prompt}])
    return llm.encode(prompt)


def _answer(llm: LLM, ids: list[int], as_json: bool) -> int:
    chunks: list[Chunk] = []
    show: Callable[[str], None] = (lambda text: None) if as_json else _show
    with contextlib.closing(llm.stream(ids)) as stream:
        interrupted = _print_answer(stream, chunks, show, llm)
    usage = llm.last_usage
    if as_json:
        print(json.dumps(_report(llm, chunks, usage), ensure_ascii=False))
    else:
        print()
        print(timings(llm, usage), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _print_answer(
    stream: Iterator[Chunk], chunks: list[Chunk], show: Callable[[str], None], llm: LLM
) -> bool:
    """Shows an answer while it comes; True if Ctrl-C stopped it."""
    with ctrl_c() as pressed:
        for chunk in stream:
            chunks.append(chunk)
            # Without a tokenizer there is no text: the ids are the answer.
            show(chunk.text if llm.tokenizer else "".join(f"{id} " for id in chunk.token_ids))
            if pressed():
                return True
    return False


@contextlib.contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed, instead of interrupting a step in its middle.

    Pressed a second time, it interrupts whatever goes on.
    """
    pressed = False

    def note(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(llm: LLM, chunks: list[Chunk], usage: Usage) -> dict[str, Any]:
    logprobs = [asdict(entry) for chunk in chunks for entry in chunk.logprobs]
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [id for chunk in chunks for id in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason if chunks else None,
        **({"logprobs": logprobs} if logprobs else {}),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "timings": {
            "load_seconds": round(llm.load_seconds, 3),
            "compile_seconds": round(llm.compile_seconds, 3),
            "prefill_tokens_per_second": round(usage.prefill_rate, 1),
            "decode_tokens_per_second": round(usage.decode_rate, 1),
        },
    }


def timings(llm: LLM, usage: Usage) -> str:
    """One line: seconds to load and to compile, tokens per second of prompt and answer."""
    return (
        f"load {llm.load_seconds:.2f} s | compile {llm.compile_seconds:.2f} s | "
        f"prefill {usage.prompt_tokens} tokens, {usage.prefill_rate:.1f} tokens/s | "
        f"decode {usage.completion_tokens} tokens, {usage.decode_rate:.1f} tokens/s"
    )


class Chat:
    """A conversation in the terminal."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = []

    def run(self, first: str | None) -> int:
        """Asks and answers until the user ends it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        if not self.llm.can_chat:
            raise RequestError(
                "the model has no chat template or no tokenizer; "
                "set prompt.template, or continue a text with --raw --prompt"
            )
        print(HELP, file=sys.stderr)
        text = first
        while True:
            if text is None:
                try:
                    text = input("> ")
                except EOFError:
                    print()
                    return 0
                except KeyboardInterrupt:
                    print("  (Ctrl-D ends)")
                    continue
            match text.strip():
                case "":
                    pass
                case "/exit":
                    return 0
                case "/reset":
                    self.messages.clear()
                case "/help":
                    print(HELP)
                case message:
                    self.answer(message)
            text = None

    def answer(self, message: str) -> None:
        """Answers one message; what Ctrl-C leaves of an answer stays in the conversation."""
        asked: dict[str, str] = {"role": "user", "content": message}
        chunks: list[Chunk] = []
        try:
            with contextlib.closing(self.llm.stream([*self.messages, asked])) as stream:
                _print_answer(stream, chunks, _show, self.llm)
        except USER_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return
        text = "".join(chunk.text for chunk in chunks)
        self.messages += [asked, {"role": "assistant", "content": text}]
        print()
        print(timings(self.llm, self.llm.last_usage), file=sys.stderr)


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
