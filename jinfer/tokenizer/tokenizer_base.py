"""Tokenizer interface: encoding, decoding, special tokens, incremental detokenization."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jinfer.sandbox import sanitize
from jinfer.tokenizer import piece_bytes
from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.fim_tokens import FimTokens, find_fim_tokens
from jinfer.tokenizer.piece_bytes import PieceBytes

# Special tokens that are searched for in a text; speech models have one for each of 65,536 sounds.
MAX_PARSED = 100_000
# Private-use characters in an unpredictable order, so that no untrusted text contains them.
MARK = "".join(map(chr, random.SystemRandom().choices(range(0xE000, 0xF900), k=8)))


class TokenizerError(ValueError):
    """An unusable tokenizer file, or a call that the tokenizer does not support."""

    def __init__(self, text: str) -> None:
        """Truncates a text of more than 1000 characters, as it may contain tokens of the file."""
        super().__init__(sanitize.sanitized(text, 1000))


def one_line(error: BaseException) -> str:
    """An error's message as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def library_errors(path: Path, what: str) -> Iterator[None]:
    """Converts any error that a library raises to `TokenizerError`.

    Panics in the Rust code of `tokenizers` are not subclasses of `Exception`.
    """
    try:
        yield
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{path}: {what}: {one_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path}: {what}: {one_line(error)}") from None


@contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Prefixes a `TokenizerError` with the path, unless it names a file of its folder."""
    try:
        yield
    except TokenizerError as error:
        if str(error).startswith((str(path), f"{path.parent}/")):
            raise
        raise TokenizerError(f"{path}: {error}") from None


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a vocabulary.

    Attributes:
        bos, pad, unk, mask: their ids; None if the model has none.
        user, assistant: tokens that begin a turn, from generation_config.json (Baichuan).
        eos: all ids that end a text.
        control: name -> id of the tokens that `encode` parses in a text if allowed, and that
            `decode` skips.
        parsed: further names that are parsed in a text, but decoded as text.
        lstrip, rstrip: names that strip white space before or after them when parsed.
        prefix, suffix: ids that `encode` adds around a text.
        languages: language name -> id of its token. The default language's token is in `prefix` or
            `suffix`; `encode(..., language=...)` replaces it.
        fim: ids of FIM tokens that a file names, by GGUF's keys (`find_fim_tokens`).
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    mask: int | None = None
    user: int | None = None
    assistant: int | None = None
    control: Mapping[str, int] = field(default_factory=dict)
    parsed: Mapping[str, int] = field(default_factory=dict)
    lstrip: frozenset[str] = frozenset()
    rstrip: frozenset[str] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    fim: Mapping[str, int] = field(default_factory=dict)


def pattern_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of the names; None without names."""
    longest_first = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _with_mark(found: re.Match[str]) -> str:
    name = found[0]
    return f"{name[0]}{MARK}{name[1:]}" if len(name) > 1 else name


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: number of ids, including special ones. The embedding may have more rows.
        special: the special tokens.
        bos_id, eos_ids, pad_id, unk_id, mask_id: ids from `special`.
    """

    def __init__(self, vocab_size: int, special: SpecialTokens, surface: PieceBytes) -> None:
        self.vocab_size = vocab_size
        self.special = special
        self.bos_id = special.bos
        self.eos_ids = special.eos
        self.pad_id = special.pad
        self.unk_id = special.unk
        self.mask_id = special.mask
        self.strip_space = surface.strip_space
        self._surface = surface
        self._bytes: dict[int, bytes] = {}
        self._control_ids = frozenset(special.control.values())
        found = {**special.parsed, **special.control}
        if len(found) > MAX_PARSED:
            reason = f"has {len(found)} special tokens; at most {MAX_PARSED} are looked for"
            raise TokenizerError(f"the vocabulary {reason}")
        # Control tokens that may be words, such as ChatGLM's "sop", are never parsed in a text.
        words = {name for name, id in found.items() if name in special.control or id == special.unk}
        self._found = {n: id for n, id in found.items() if not (n.isalnum() and n in words)}
        self._pattern = pattern_of(self._found)
        self._control = pattern_of(special.control)

    @abstractmethod
    def token(self, id: int) -> str:
        """The name of a token in the vocabulary; "" for an unknown id."""

    @abstractmethod
    def id(self, token: str) -> int | None:
        """The id of a token's name; None if there is none."""

    @cached_property
    def fim(self) -> FimTokens | None:
        """The tokens for fill-in-the-middle; None if the vocabulary has none."""
        return find_fim_tokens(self.id, self.token, self.special.fim)

    @abstractmethod
    def _encode(self, text: str, parse_special: bool) -> list[int]: ...

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        parse_special: bool = True,
        language: str | None = None,
    ) -> list[int]:
        """Encode a text.

        Args:
            text: lone surrogates in it are replaced by U+FFFD.
            special: add the model's special tokens (BOS, EOS, [CLS] and [SEP], a language).
            parse_special: special tokens written in the text become their ids; if False, they are
                plain text, as they should be in untrusted text.
            language: the language of the text, for models that mark it (M2M100: "en", NLLB:
                "eng_Latn"); its token replaces the default language's.

        Raises:
            TokenizerError: a language that the model does not have.
        """
        prefix, suffix = self.special.prefix, self.special.suffix
        if language is not None:
            chosen = self.language_id(language)
            prefix, suffix = self._in_language(prefix, chosen), self._in_language(suffix, chosen)
        ids = self._encode(valid_text(text), parse_special)
        return [*prefix, *ids, *suffix] if special else ids

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Encode a text given in parts, ids and plain text, without adding special tokens."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._encode(valid_text(part), False)
        return ids

    def hide_control(self, text: str) -> str:
        """The text with `MARK` inside every control token's name, so that none is parsed."""
        text, before = text.replace(MARK, ""), ""
        while self._control and text != before:  # removing a name may form another
            before = text
            text = self._control.sub(_with_mark, text)
        return text

    def encode_marked(self, text: str) -> list[int]:
        """Encode a text, parsing special tokens except those that `hide_control` hid.

        Hidden ones are encoded as plain text. No special tokens are added.
        """
        parts = self.split_special(valid_text(text))
        return self.encode_parts([p if isinstance(p, int) else p.replace(MARK, "") for p in parts])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids and token types (0 first, 1 second) of a text pair.

        A vocabulary that says nothing of pairs has each text framed as if it were alone; where a
        text is framed on both sides the second one begins with its end, as of RoBERTa.
        """
        prefix, suffix = self.special.prefix, self.special.suffix
        left, right = (self._encode(valid_text(text), True) for text in (first, second))
        ids = [*prefix, *left, *suffix, *(suffix or prefix if prefix else ()), *right, *suffix]
        return ids, [0] * len(ids)

    def language_id(self, language: str) -> int:
        """The id of a language's token, with which a translation into it starts."""
        result = self.special.languages.get(language)
        if result is None:
            known = ", ".join(sorted(self.special.languages)) or "none"
            raise TokenizerError(f"language {language!r} is unknown; the tokenizer has: {known}")
        return result

    def _in_language(self, ids: tuple[int, ...], chosen: int) -> tuple[int, ...]:
        languages = set(self.special.languages.values())
        return tuple(chosen if id in languages else id for id in ids)

    def split_special(self, text: str) -> list[str | int]:
        """The text split at the special tokens written in it: ids, and the texts between."""
        return self._split(text, self._pattern)

    def _split(self, text: str, pattern: re.Pattern[str] | None) -> list[str | int]:
        """The text split at the special tokens that a pattern matches."""
        parts: list[str | int] = []
        place, bare = 0, False  # bare: white space at the place was stripped by a token
        for match in pattern.finditer(text) if pattern is not None else ():
            name = match[0]
            parts.append(self._between(text[place : match.start()], bare, name))
            parts.append(self._found[name])
            place, bare = match.end(), name in self.special.rstrip
        parts.append(self._between(text[place:], bare, ""))
        return [part for part in parts if part != ""]

    def _between(self, text: str, bare: bool, following: str) -> str:
        text = text.lstrip() if bare else text
        return text.rstrip() if following in self.special.lstrip else text

    def is_control(self, id: int) -> bool:
        """Whether `decode` skips the token."""
        return id in self._control_ids

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text: part of a character, or several characters.

        Empty for control tokens and unknown ids. The space at the start of a text is included (see
        `strip_space`).
        """
        return b"" if id in self._control_ids else self.spelled(id)

    def spelled(self, id: int) -> bytes:
        """Like `token_bytes`, but control tokens are spelled out."""
        result = self._bytes.get(id)
        if result is None:
            result = self._bytes[id] = self._spell(id)
        return result

    def _spell(self, id: int) -> bytes:
        name = self.token(id)
        if id in self._control_ids:
            return piece_bytes.plain(name)
        return self._surface.to_bytes(name) if name else b""

    def token_text(self, id: int) -> str:
        """A single token as text; its vocabulary name if its bytes are not valid UTF-8."""
        try:
            return self.spelled(id).decode("utf-8") or self.token(id)
        except UnicodeDecodeError:
            return self.token(id)

    def __repr__(self) -> str:
        named = {"bos": self.bos_id, "pad": self.pad_id, "unk": self.unk_id, "mask": self.mask_id}
        words = [f"{name} {id} {self.token(id)!r}" for name, id in named.items() if id is not None]
        ends = ", ".join(f"{id} {self.token(id)!r}" for id in self.eos_ids[:4])
        more = f" and {len(self.eos_ids) - 4} more" if len(self.eos_ids) > 4 else ""
        words += [f"eos {ends}{more}"] if ends else []
        special = f"{len(self.special.control)} special"
        return f"{type(self).__name__}({self.vocab_size} tokens, {special}, {', '.join(words)})"

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode token ids: their joined bytes, with U+FFFD for invalid UTF-8.

        Args:
            ids: unknown ids add nothing.
            skip_special: skip control tokens; else they are spelled out.
        """
        of = self.token_bytes if skip_special else self.spelled
        data = b"".join([of(id) for id in ids])
        if self.strip_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
        shown: Collection[int] = (),
    ) -> Detokenizer:
        """An incremental detokenizer for the tokens that follow `prompt_ids`.

        Args:
            skip_special: skip control tokens.
            shown: control tokens that are spelled out all the same.
        """

        def unless_shown(id: int) -> bytes:
            return self.spelled(id) if id in shown else self.token_bytes(id)

        of = self.spelled if not skip_special else unless_shown if shown else self.token_bytes
        return Detokenizer(of, self.strip_space, prompt_ids)


def valid_text(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    if not isinstance(text, str):
        raise TokenizerError(f"a text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
