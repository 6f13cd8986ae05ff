"""Chat loop (REPL): what local and remote conversations in a terminal share."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from jinfer.cli.terminal.slash_commands import ALIASES, COMMANDS, Chat, run_command
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sandbox.safe_files import read_regular_file
from jinfer.template.chat_prompt import Message

PROMPT, MORE = "> ", "... "
BLOCK = '"""'
NO_HISTORY = "JINFER_NO_HISTORY"
MAX_LINES = 1000
MAX_BYTES = 1 << 20


class TypedInput(NamedTuple):
    """Input from the user.

    Attributes:
        text: the text, without line continuations and quotes.
        block: whether it was quoted, and so is not a command.
    """

    text: str
    block: bool = False


def read_message() -> TypedInput:
    r'''Reads a message: a line, lines that end in \, or all between two """.

    Raises:
        EOFError: the end of the input.
        KeyboardInterrupt: Ctrl-C.
    '''
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return TypedInput(_block(line.lstrip().removeprefix(BLOCK)), block=True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(MORE))
    return TypedInput("\n".join(lines))


def _block(line: str) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


@contextlib.contextmanager
def history(commands: Sequence[str] = ()) -> Iterator[None]:
    """Line editing with a history file.

    Args:
        commands: words that Tab completes at the beginning of a line.
    """
    try:
        import readline
    except ImportError:  # not available on every system
        yield
        return
    readline.set_completer(lambda text, number: completion(text, number, commands))
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    path = history_file() if sys.stdin.isatty() else None
    for line in _kept(path):
        readline.add_history(line)
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        count = readline.get_current_history_length()
        new = [readline.get_history_item(i + 1) or "" for i in range(before, count)]
        if path is not None and new:
            append_history(path, new)


def completion(text: str, number: int, commands: Sequence[str]) -> str | None:
    """The number-th completion of a text; None: there are no more (readline's protocol)."""
    fitting = [f"/{name}" for name in commands if f"/{name}".startswith(text)]
    return fitting[number] if text.startswith("/") and number < len(fitting) else None


def history_file() -> Path | None:
    """The history file; None if history is disabled or there is no home folder."""
    if os.environ.get(NO_HISTORY, "0") not in ("", "0"):
        return None
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return Path(state) / "jinfer" / "chat_history"


def append_history(path: Path, new: list[str]) -> None:
    """Append lines to a history file, up to its limit; only the user may read it.

    The file is read again, because another chat may have written it meanwhile.
    """
    lines = [*_kept(path), *(" ".join(line.splitlines()) for line in new)][-MAX_LINES:]
    while sum(len(line.encode(errors="replace")) + 1 for line in lines) > MAX_BYTES:
        del lines[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(  # readable by the user only
            "w", dir=path.parent, delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(file.name, path)
    except OSError as error:
        print(f"the history is not kept: {path}: {error.strerror}; {NO_HISTORY}=1", file=sys.stderr)


def _kept(path: Path | None) -> list[str]:
    try:
        if path is None or not path.is_file():
            return []
        content = read_regular_file(path, 2 * MAX_BYTES)
    except OSError:  # also `FileRefusedError`
        return []
    return content.decode(errors="replace").splitlines()[-MAX_LINES:]


HINT = "/help lists commands, Ctrl-C stops an answer, /exit or Ctrl-D ends"
STOPPED = " [stopped]"
UNANSWERED = "[stopped: /retry asks again, another message takes its place]"
_WORDS = ("exit", "quit")


class ChatSession(Chat):
    """A conversation in a terminal.

    Attributes:
        caught: exceptions that are printed as one line, after which the chat continues.
    """

    caught: ClassVar[tuple[type[Exception], ...]] = (RequestError, SpecError)

    def run(self, first: str | None) -> int:
        """Run the loop until the user ends it; return the exit status."""
        print(HINT, file=sys.stderr)
        with history([*COMMANDS, *ALIASES]):
            given = None if first is None else TypedInput(first, block=True)
            while not self.ended:
                try:
                    typed, given = given or read_message(), None
                    self.take(typed)
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print("  (/exit or Ctrl-D ends)")
        return 0

    def take(self, typed: TypedInput) -> None:
        """Handle a message or a command; an error is printed as one line."""
        text = typed.text if typed.block else typed.text.strip()
        try:
            if not typed.block and text.lower() in _WORDS:
                self.ended = True
            elif not typed.block and text.startswith("/"):
                run_command(self, text)
            elif text.strip():
                images, self.images = self.images, []
                self.answer([*images, {"type": "text", "text": text}] if images else text)
        except self.caught as error:
            print(f"error: {error}", file=sys.stderr)

    def answered_messages(self) -> list[Message]:
        """The messages without a trailing unanswered one."""
        last = self.messages[-1:]
        unanswered = bool(last) and last[0]["role"] == "user"
        return self.messages[:-1] if unanswered else list(self.messages)


def drop_oldest_turn(messages: list[Message]) -> int:
    """Drop the oldest turn, never a system message or the last question; how many messages."""
    first = 1 if messages[0]["role"] == "system" else 0
    later = (i for i, message in enumerate(messages) if i > first and message["role"] == "user")
    end = next(later, first)
    del messages[first:end]
    return end - first


def print_rates(line: str) -> None:
    """Print a line of statistics, dimmed."""
    dim = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    faint = dim and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{line}\x1b[0m" if faint else line, file=sys.stderr)


def check_streamable(params: SamplingParams) -> SamplingParams:
    """Check that parameters give a single, streamable answer. Raises `RequestError`."""
    if params.strategy == "beam" or max(params.n, params.best_of or 1) > 1:
        raise RequestError("a chat has one answer at a time: no beam search, no n, no best_of")
    return params
