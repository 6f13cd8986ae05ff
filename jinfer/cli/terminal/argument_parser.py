"""Argument parser (argparse) of all commands, and flags from the fields of dataclasses.

Errors are one line with the nearest flag; `--help` shows the most important flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NoReturn, get_args, get_origin

from jinfer.cli.prog_name import prog_of_module
from jinfer.modelspec.bounded_types import (
    Reader,
    WrongValue,
    details,
    documentation,
    fields,
    from_text,
    read_text,
    union,
)
from jinfer.modelspec.foreign_names import flag_aliases
from jinfer.modelspec.spec_errors import show_value

PREFIX = "JINFER_"  # of environment variables
_CLOSE = 0.6


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field.

    Attributes:
        name: of the field.
        flag: the flag that help texts show.
        aliases: other names of it.
        type: of its values, with bounds.
        help: one line.
        default: the value without the flag.
        key: the key of a specification that it sets.
        metavar: the name of its value in help texts, or "" for that of its type.
    """

    name: str
    flag: str
    aliases: tuple[str, ...]
    type: Any
    help: str
    default: Any = None
    key: str = ""
    metavar: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def repeated(self) -> bool:
        """Whether each use of the flag adds an item to a list."""
        inner, note = _first(self.type)
        return note.repeated if isinstance(note, Reader) else get_origin(inner) is tuple

    @property
    def switch(self) -> bool:
        """Whether it has no value."""
        return union(self.type)[0] is bool and len(union(self.type)) == 1

    def read(self, text: str) -> Any:
        """Reads a text. Raises `WrongValue`."""
        return from_text(self.type, text) if self.repeated else read_text(self.type, text)

    def read_variable(self, text: str) -> Any:
        """Reads its environment variable; items of a list are separated by commas.

        Raises:
            WrongValue: its type does not allow the text.
        """
        if self.repeated:
            return [self.read(item.strip()) for item in text.split(",") if item.strip()]
        return self.read(text)


def spelled(name: str) -> str:
    """The flag of a field."""
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


@cache
def flags_of(*classes: Any) -> tuple[Flag, ...]:
    """The flags of the fields of dataclasses that `option` made."""
    flags = []
    for cls in classes:
        texts = help_texts(cls)
        for name, (field, hint) in fields(cls).items():
            if "flag" in field.metadata:
                flag, key = field.metadata["flag"] or spelled(name), field.metadata["key"]
                others = tuple(dict.fromkeys(a for a in flag_aliases(name, key) if a != flag))
                made = field.default_factory
                default = field.default if made is dataclasses.MISSING else made()
                rest = hint, texts[name], default, key, field.metadata["metavar"]
                flags.append(Flag(name, flag, others, *rest))
    return tuple(flags)


def help_texts(cls: Any) -> dict[str, str]:
    """Help texts by field; of fields that are documented together, the first has the text."""
    texts: dict[str, str] = {}
    for (first, *others), text in documentation(cls).items():
        texts[first] = f"(with {', '.join(others)}) {text}" if others else text
        texts |= dict.fromkeys(others, f"see {spelled(first)}")
    return texts


def add_flags(group: Any, flags: Iterable[Flag], negatable: bool = False) -> None:
    """Adds flags to a parser or to a group of it; `--help` does not show aliases.

    Args:
        negatable: whether there is a `--no-...` of each switch.
    """
    for flag in flags:
        how: dict[str, Any] = {"dest": flag.name, "help": _help(flag).replace("%", "%%")}
        if flag.switch and negatable:
            how["action"] = argparse.BooleanOptionalAction
        elif flag.switch:
            how |= {"action": "store_const", "const": True}
        else:
            how |= {"type": partial(_converted, flag.read), "metavar": _metavar(flag)}
            how |= {"action": "append"} if flag.repeated else {}
        group.add_argument(flag.flag, **how)
        if flag.aliases:
            group.add_argument(*flag.aliases, **how | {"help": argparse.SUPPRESS})


def _converted(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except WrongValue as wrong:
        reason = f"{show_value(wrong.value)} is not {wrong.expected}{wrong.hint}"
        raise argparse.ArgumentTypeError(reason) from None


def _first(hint: Any) -> tuple[Any, Any]:
    return details(union(hint)[0])


def _words(hint: Any) -> list[str]:
    literals = [option for option in union(hint) if get_origin(option) is Literal]
    words = ["true", "false"] if literals and bool in union(hint) else []
    return words + [str(word) for option in literals for word in get_args(option)]


def _metavar(flag: Flag) -> str:
    inner, note = _first(flag.type)
    if flag.metavar or isinstance(note, Reader):
        return flag.metavar or str(note.metavar)
    return "|".join(_words(flag.type)) or {int: "N", float: "X"}.get(inner, "TEXT")


def _help(flag: Flag) -> str:
    """The help text, with the allowed words where the name of the value does not have them."""
    text, words = flag.help.removesuffix("."), _words(flag.type)
    return f"{text}: {', '.join(words)}" if words and flag.metavar else text


class CliParser(argparse.ArgumentParser):
    """An argument parser.

    Args:
        short: flags that `--help` shows, where `--help-all` shows all; empty: `--help` shows all.
        words: name of a positional argument that may be between or after flags.
        instead: what to do instead of a flag that does not exist; "" if that is unknown.
    """

    def __init__(
        self,
        *args: Any,
        short: Collection[str] = (),
        words: str = "",
        instead: Callable[[str], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._short, self._words, self._instead = short, words, instead or (lambda flag: "")
        super().__init__(*args, **kwargs)
        if short:
            self.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `ArgumentParser`, but unknown arguments are errors."""
        given = [*(sys.argv[1:] if args is None else args)]
        self._reject_foreign(given)
        found, left = super().parse_known_args(given, namespace)
        flags = [word for word in left if word.startswith("-") and word != "-"]
        if flags or (left and not self._words):
            self.error(self._unknown(flags[0] if flags else left[0]))
        if left:
            setattr(found, self._words, [*(getattr(found, self._words) or ()), *left])
        return found, []

    def error(self, message: str) -> NoReturn:
        """Exits with a one-line error."""
        self.exit(2, f"error: {message} ({self.prog} --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Prints the help, only of the most important flags if there are many."""
        if not self._short:
            super().print_help(file)
            return
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        flags = [self._option_string_actions[flag] for flag in self._short]
        formatter.start_section("the most important")
        formatter.add_arguments([a for a in self._actions if not a.option_strings] + flags)
        formatter.end_section()
        count = sum(bool(a.option_strings) and a.help != argparse.SUPPRESS for a in self._actions)
        formatter.add_text(f"{self.prog} --help-all shows all {count} flags.")
        self._print_message(formatter.format_help(), file or sys.stdout)

    def _reject_foreign(self, given: Iterable[str]) -> None:
        """Rejects flags of other engines and names the equivalent."""
        for word in given:
            if word == "--":
                return
            flag = word.partition("=")[0]
            if flag not in self._option_string_actions and (hint := self._instead(flag)):
                self.error(f"there is no flag {flag}: {hint}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        flag = word.partition("=")[0]
        every = {
            _plain(name): (name, action.help != argparse.SUPPRESS)
            for name, action in self._option_string_actions.items()
            if name.startswith("--")
        }
        if _plain(flag) not in every and (hint := self._instead(flag.replace("_", "-"))):
            return f"there is no flag {flag}: {hint}"
        shown = {plain: name for plain, (name, visible) in every.items() if visible}
        if _plain(flag) in every:
            shown[_plain(flag)] = every[_plain(flag)][0]
        near = difflib.get_close_matches(_plain(flag), shown, 1, _CLOSE)
        hint = f"; did you mean {shown[near[0]]}?" if near else ""
        return f"there is no flag {flag}{hint}"


def argument(*names: str, **how: Any) -> Callable[[Any], Any]:
    """Adds an argument to a parser or a group; parameters as of `ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(*names, **how)


def several(*names: str, **how: Any) -> Callable[[Any], Any]:
    """As `argument`, for one that may be repeated: a list."""
    return argument(*names, action="append", default=[], **how)


def one_of(*arguments: Callable[[Any], Any], required: bool = False) -> Callable[[Any], Any]:
    """Adds arguments of which at most one may be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for add_argument in arguments:
            add_argument(group)

    return add


def parse(
    module: str,
    words: Sequence[str] | None,
    description: str,
    *arguments: Callable[[Any], Any],
    **how: Any,
) -> argparse.Namespace:
    """Parses the words of a command (those of the process by default).

    Args:
        module: of the command, for its name in messages.
        how: of `ArgumentParser`.
    """
    parser = CliParser(prog=prog_of_module(module), description=description, **how)
    for add in arguments:
        add(parser)
    return parser.parse_args(words)


class _HelpAll(argparse.Action):
    """Shows all flags."""

    def __init__(self, option_strings: Sequence[str], help: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def _plain(flag: str) -> str:
    return flag.replace("-", "").replace("_", "").lower()
