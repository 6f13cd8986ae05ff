"""What is typed in a terminal: messages of one line or several, and their history."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinfer.guard.safe_files import FileRefused, read_regular

PROMPT, MORE = "> ", "... "
BLOCK = '"""'
OFF = "JINFER_NO_HISTORY"
MAX_LINES = 1000
MAX_BYTES = 1 << 20


class Typed(NamedTuple):
    """What was typed.

    Attributes:
        text: without what joins its lines.
        block: whether it stood between quotes, and so is no command whatever it begins with.
    """

    text: str
    block: bool = False


def read() -> Typed:
    r'''One message: a line, lines that end in \, or all between two """.

    Raises:
        EOFError: there is no more.
        KeyboardInterrupt: Ctrl-C.
    '''
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return Typed(_block(line.lstrip().removeprefix(BLOCK)), block=True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(MORE))
    return Typed("\n".join(lines))


def _block(line: str) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


@contextlib.contextmanager
def history(commands: Sequence[str] = ()) -> Iterator[None]:
    """Line editing, with the lines of earlier runs; new ones are kept for later runs.

    Args:
        commands: that Tab completes at the beginning of a line.
    """
    try:
        import readline
    except ImportError:  # not on every system
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
            keep(path, new)


def completion(text: str, number: int, commands: Sequence[str]) -> str | None:
    """The number-th word that a text may become; None: there are no more."""
    fitting = [f"/{name}" for name in commands if f"/{name}".startswith(text)]
    return fitting[number] if text.startswith("/") and number < len(fitting) else None


def history_file() -> Path | None:
    """Where the history is; None where the user wants none, or has no home."""
    if os.environ.get(OFF, "0") not in ("", "0"):
        return None
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return Path(state) / "jinfer" / "chat_history"


def keep(path: Path, new: list[str]) -> None:
    """Adds lines to a history, of which the last ones stay; nobody else may read it.

    It is read again, because another chat may have ended meanwhile.
    """
    lines = [*_kept(path), *(" ".join(line.splitlines()) for line in new)][-MAX_LINES:]
    while sum(len(line.encode(errors="replace")) + 1 for line in lines) > MAX_BYTES:
        del lines[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(  # made for the user alone
            "w", dir=path.parent, delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(file.name, path)
    except OSError as error:
        print(f"the history is not kept: {path}: {error.strerror}; {OFF}=1", file=sys.stderr)


def _kept(path: Path | None) -> list[str]:
    try:
        content = b"" if path is None or not path.is_file() else read_regular(path, 2 * MAX_BYTES)
    except (FileRefused, OSError):
        return []
    return content.decode(errors="replace").splitlines()[-MAX_LINES:]
