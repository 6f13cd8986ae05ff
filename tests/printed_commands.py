"""Commands and blocks of Python that a page prints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("jinfer", "python", "make", "pytest", "pip", ".ci/run", "mv", "tail", "curl")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Printed:
    """A command, or a block of Python, and where it stands."""

    page: str
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def printed_on(page: Path) -> Iterator[Printed]:
    """All that a page prints that can be run, from its blocks and from within its sentences."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        language, inside = fence.groups()
        line = text.count("\n", 0, fence.start()) + 2
        if language == "python":
            found.append(Printed(page.name, line, language, inside))
        elif language in ("sh", "console"):
            found += commands(page.name, line, inside, "$ " if language == "console" else "")
    # Blocks become empty lines, so that lines keep their numbers.
    rest = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for span in _SPAN.finditer(rest):
        command = " ".join(span[1].split())
        if is_command(command):
            line = rest.count("\n", 0, span.start()) + 1
            found.append(Printed(page.name, line, "sh", command))
    yield from sorted(found, key=lambda each: each.line)


def commands(page: str, line: int, block: str, prompt: str) -> Iterator[Printed]:
    """The commands of a block; a backslash at its end joins a line to the next."""
    joined = re.sub(r"\\\n\s*", lambda found: "\0" * found[0].count("\n"), block)
    for each in joined.split("\n"):
        if each.strip() and each.startswith(prompt):
            text = each.removeprefix(prompt).replace("\0", "")
            yield Printed(page, line, "sh", re.sub(r"\s+#.*", "", text).strip())
        line += 1 + each.count("\0")


def is_command(text: str) -> bool:
    """Whether words between backticks are a command, not a path or a name of something."""
    program, _, rest = text.partition(" ")
    if program in ("jinfer", ".ci/run"):
        return True
    if program == "python":
        return rest.startswith("-m ")
    return program in PROGRAMS and bool(rest)
