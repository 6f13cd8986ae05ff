"""Argument parser (argparse) of all commands: one-line errors with the nearest flag, short help."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

_CLOSE = 0.6


class CliParser(argparse.ArgumentParser):
    """An argument parser.

    Args:
        short: flags that `--help` shows, where `--help-all` shows all; empty: `--help` shows all.
        words: name of a positional argument that may stand between or after flags.
        instead: flags of other engines -> the equivalent here.
    """

    def __init__(
        self,
        *args: Any,
        short: Collection[str] = (),
        words: str = "",
        instead: Mapping[tuple[str, ...], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._short, self._words, self._instead = short, words, instead or {}
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
        known = self._option_string_actions
        for word in given:
            if word == "--":
                return
            flag = word.partition("=")[0]
            for names, why in self._instead.items():
                if flag in names and flag not in known:
                    self.error(f"there is no flag {flag}: {why}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        flag = word.partition("=")[0]
        known = {
            _plain(name): name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--") and action.help != argparse.SUPPRESS
        }
        same = _plain(flag) in known
        if self._instead and not same and (said := _keyword(flag)):
            return f"there is no flag {flag}: {said}"
        near = difflib.get_close_matches(_plain(flag), known, 1, _CLOSE)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        return f"there is no flag {flag}{hint}"


class _HelpAll(argparse.Action):
    """Shows all flags."""

    def __init__(self, option_strings: Sequence[str], help: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def _keyword(flag: str) -> str:
    """The equivalent of a flag that is named after another engine's keyword; or ""."""
    # Imported here, because only errors need it.
    from jinfer.loader.open_keywords import FOREIGN

    said = FOREIGN.get(flag.lstrip("-").replace("-", "_"), "")
    return said if " " in said or not said else f"--set {said}=... is that key"


def _plain(flag: str) -> str:
    return flag.replace("-", "").replace("_", "").lower()
