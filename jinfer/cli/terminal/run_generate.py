"""`jinfer generate`: runs what the flags ask for: a list of models, answers, or a chat."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.api.image_inputs import EncodedPrompt
from jinfer.api.llm import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.terminal import INTERRUPTED, show_answer
from jinfer.cli.terminal.argument_parser import spelled
from jinfer.cli.terminal.chat_loop import STOPPED
from jinfer.cli.terminal.flag_conflicts import (
    FLAG_OF_KEY,
    FlagError,
    check,
    check_effects,
    merge_alternatives,
)
from jinfer.cli.terminal.generate_flags import sampling, token_ids
from jinfer.cli.terminal.local_chat import LocalChat
from jinfer.cli.terminal.slash_commands import image_part
from jinfer.cli.terminal.text_wrap import WrappingWriter
from jinfer.engine.output.completion import Chunk
from jinfer.engine.requests import RequestError
from jinfer.loader import model_catalogue
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import parse_override
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.parallel.distributed.job_config import find_job
from jinfer.progress import task
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file
from jinfer.startup import interrupts_raised
from jinfer.template.chat_prompt import Message

MAX_PROMPT = 64 << 20  # bytes


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status. A user's mistake is one line and status 2."""
    try:
        options = merge_alternatives(options)
        silent = options.prompt is None and options.prompt_file is None and options.ids is None
        chat = options.chat or (silent and options.list is None and sys.stdin.isatty())
        check(options, chat)
        if options.list is not None:
            print(model_catalogue.table(text=options.list))
            return 0
        job = find_job(vars(options), os.environ)
        if job is None:
            return _run(options, chat, silent)
        # Imported here, because a single process does not need it.
        from jinfer.api.job_processes import run_job, run_worker

        return run_job(
            job,
            lambda: _run(options, chat, silent),
            lambda: run_worker(options.source, _overrides(options)),
        )
    except SpecError as error:
        print(f"error: {_flag_of(error, sampling(options)) or error}", file=sys.stderr)
        return 2
    except (*USER_ERRORS, FlagError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _flag_of(error: SpecError, given: Mapping[str, Any]) -> str | None:
    """The error of a sampling parameter given by flag: names the flag instead of the file."""
    for name in given if error.key == "generation" else ():
        if error.reason.startswith(f"{name} "):
            return f"{spelled(name)}{error.reason.removeprefix(name)}"
    return None


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Keys of the specification that flags set."""
    overrides: dict[str, Any] = {}
    for text in options.set or ():
        overrides = merge(overrides, parse_override(text))
    for key, name in FLAG_OF_KEY.items():
        if (value := getattr(options, name)) is not None:
            overrides = merge(overrides, nested(key, value))
    if options.system is not None:
        overrides = merge(overrides, {"prompt": {"system": options.system}})
    if changes := sampling(options):
        overrides = merge(overrides, {"generation": changes})
    return overrides


def _run(options: argparse.Namespace, chat: bool, silent: bool) -> int:
    prompt = None if silent and chat else _prompt(options)
    with interrupts_raised():
        llm = LLM(
            options.source,
            progress=sys.stderr.isatty(),
            threads=options.threads,
            first=lambda llm: _first(llm, options, None if chat else prompt),
            **_overrides(options),
        )
    if sys.stderr.isatty():
        if chat:
            print(llm.session.described(), file=sys.stderr)
        print(llm.session.cache_report(), file=sys.stderr)
    if chat:
        session = LocalChat(llm)
        session.images += map(image_part, options.image or ())
        return session.run(prompt if isinstance(prompt, str) else None)
    encoded = _asked(llm, prompt or "", options)
    if options.explain_speculation:
        return show_answer.explain(llm, encoded)
    return _answer(llm, encoded, options.json)


def _prompt(options: argparse.Namespace) -> str | list[int]:
    if options.ids is not None:
        return token_ids(options.ids)
    if options.prompt_file is not None:
        return _followed(_text(options.prompt_file))
    if options.prompt not in (None, "-"):
        return _followed(options.prompt)
    return _text(None)


def _followed(prompt: str) -> str:
    """A prompt followed by piped standard input, as in `jinfer client`."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no standard input, or not a file
        return prompt
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return prompt
    more = _text(None).rstrip("\n")
    return f"{prompt}\n\n{more}" if more.strip() else prompt


def _text(file: str | None) -> str:
    """The content of a file, or of standard input. Raises `RequestError`."""
    name, content = file or "standard input", b""
    try:
        if file is not None:
            content = read_regular_file(Path(file), MAX_PROMPT)
        else:
            content = sys.stdin.buffer.read()
        return content.decode("utf-8-sig")
    except FileRefusedError as error:
        raise RequestError(f"{name}: {error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{name}: is no text in UTF-8") from None


def _first(llm: LLM, options: argparse.Namespace, prompt: str | list[int] | None) -> EncodedPrompt:
    """Encode the first prompt before weights are loaded, so that its errors show early."""
    if llm.spec.decoder is None:
        raise RequestError(
            "the model has no decoder and writes no text; for its vectors there are LLM.embed in "
            "Python and /v1/embeddings of jinfer serve"
        )
    check_effects(sampling(options).keys(), llm.params())
    chat = prompt is None or options.system is not None or options.image
    if chat and not llm.can_chat:
        raise RequestError(
            "the model has no chat template or no tokenizer; "
            "set prompt.template, or continue a text with --raw --prompt"
        )
    return EncodedPrompt([]) if prompt is None else _asked(llm, prompt, options)


def _asked(llm: LLM, prompt: str | list[int], options: argparse.Namespace) -> EncodedPrompt:
    """The prompt's tokens: as a chat message if the model can chat, else as plain text."""
    if isinstance(prompt, str) and not options.raw and llm.can_chat:
        parts: list[Message] = [{"type": "image", "image": name} for name in options.image or ()]
        content = [*parts, {"type": "text", "text": prompt}]
        return llm.session.encode_conversation([{"role": "user", "content": content}])
    return llm.session.encode_prompt(prompt)


def _answer(llm: LLM, prompt: EncodedPrompt, as_json: bool) -> int:
    params = llm.params()
    if params.strategy == "beam" or max(params.n, params.best_of or 1) > 1:
        return _answers(llm, prompt, params, as_json)
    chunks: list[Chunk] = []
    screen = WrappingWriter()
    show = (lambda text: None) if as_json else screen
    with contextlib.closing(llm.stream(prompt, params)) as stream:
        interrupted = show_answer.print_answer(stream, chunks, show, llm, len(prompt))
    usage = show_answer.usage_of(llm, interrupted)
    if as_json:
        show_answer.print_report(llm, [show_answer.report_of_chunks(chunks)], usage)
    else:
        screen.end(STOPPED if interrupted and sys.stdout.isatty() else "")
        print(show_answer.timings(llm, usage), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _answers(llm: LLM, prompt: EncodedPrompt, params: SamplingParams, as_json: bool) -> int:
    """Generate several answers, or answers that are known only at the end."""
    with task("answering"):
        found = llm.generate(prompt, params)
    usage = found[0].usage
    if as_json:
        show_answer.print_report(llm, list(map(show_answer.report_of_completion, found)), usage)
        return 0
    for number, each in enumerate(found, start=1):
        if len(found) > 1:
            print(f"--- {number} of {len(found)}")
        screen = WrappingWriter()
        screen(show_answer.display_text(llm, each.text, each.token_ids))
        screen.end()
    print(show_answer.timings(llm, usage), file=sys.stderr)
    return 0
