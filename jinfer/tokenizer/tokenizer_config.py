"""Tokenizer configuration: JSON files with special tokens, languages and flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinfer.sandbox.safe_files import FileRefusedError, path_exists, read_downloaded
from jinfer.tokenizer.tokenizer_base import SpecialTokens, TokenizerError, one_line

MAX_TOKENS = 10_000_000  # upper bound of token ids
MAX_BYTES = 256 << 20  # of a tokenizer's file
MAX_JSON_BYTES = 64 << 20

NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)

# Keys that name tokens.
_TABLES = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_USUAL_NAMES = {  # defaults if no configuration names the token
    "unk_token": ("<unk>", "[UNK]"),
    "pad_token": ("<pad>", "[PAD]"),
    "mask_token": ("<mask>", "[MASK]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
}


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a file of at most `limit` bytes. Raises `TokenizerError`."""
    try:
        return read_downloaded(path, limit)
    except FileRefusedError as error:
        raise TokenizerError(f"{path}: {error}") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a file, without their ends. Raises `TokenizerError` if it is not UTF-8."""
    data = read_file(path)
    try:
        return [line.rstrip("\r") for line in data.decode("utf-8-sig").split("\n")]
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises `TokenizerError`."""
    data = read_file(path, MAX_JSON_BYTES)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {one_line(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing. Raises `TokenizerError`."""
    if not path_exists(path):
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value


def read_vocabulary(path: Path) -> dict[str, int]:
    """A JSON object of token -> id. Raises `TokenizerError`."""
    vocabulary = read_object(path)
    for token, id in vocabulary.items():
        if type(id) is not int or not 0 <= id < MAX_TOKENS:
            raise TokenizerError(
                f"{path}: token {token[:50]!r} must have an id, not {format_value(id)}; "
                f"ids are whole numbers below {MAX_TOKENS}"
            )
    return vocabulary


def format_value(value: object) -> str:
    """A value from a file, formatted for an error."""
    try:
        return repr(value)[:200]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"this {type(value).__name__}"


@dataclass(frozen=True)
class AddedToken:
    """A token added to the vocabulary, as in added_tokens_decoder."""

    content: str
    id: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of a tokenizer in the JSON files of a checkpoint folder.

    Attributes:
        path: tokenizer_config.json, for errors.
        values: tokenizer_config.json merged over special_tokens_map.json.
        added: tokens of added_tokens_decoder, added_tokens.json and additional_special_tokens.
        named: tokens that have a name ("eos_token"), always special.
        generation: generation_config.json.
        model: config.json.
    """

    path: Path = Path("tokenizer_config.json")
    values: Mapping[str, Any] = field(default_factory=dict)
    added: tuple[AddedToken, ...] = ()
    named: frozenset[str] = frozenset()
    generation: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The tokenizer class, without a trailing "Fast"; "" if there is none."""
        return (self.text("tokenizer_class") or "").removesuffix("Fast")

    def text(self, key: str) -> str | None:
        """A string, or the `content` of a token written as an object. Raises `TokenizerError`."""
        value = self.values.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{self.path}: {key} must be a string, not {format_value(value)}")
        return value

    def flag(self, key: str) -> bool | None:
        """True, false, or None if it is missing or null. Raises `TokenizerError`."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise TokenizerError(
                f"{self.path}: {key} must be true or false, not {format_value(value)}"
            )
        return value

    def number(self, key: str, default: int) -> int:
        """An integer of at most 10,000. Raises `TokenizerError`."""
        value = self.values.get(key, default)
        if type(value) is not int or not 0 <= value <= 10_000:
            raise TokenizerError(
                f"{self.path}: {key} must be a whole number up to 10000, not {format_value(value)}"
            )
        return value

    def names(self) -> list[str]:
        """additional_special_tokens in order."""
        return [
            _added(self.path, entry).content for entry in _list(self, "additional_special_tokens")
        ]


def read_config(folder: Path) -> TokenizerConfig:
    """Read the JSON files that exist in a folder. Raises `TokenizerError`."""
    path = folder / "tokenizer_config.json"
    values = {**read_object(folder / "special_tokens_map.json"), **read_object(path)}
    config = TokenizerConfig(
        path=path,
        values=values,
        generation=read_object(folder / "generation_config.json"),
        model=read_object(folder / "config.json"),
    )
    file = folder / "added_tokens.json"
    named = {token.content: replace(token, special=True) for token in _named(config)}
    added = {token.content: token for token in _unnamed(config)} | named
    for name, id in read_vocabulary(file).items():
        added[name] = AddedToken(name, id, special=name in added)
    for token in _decoder(config):
        added[token.content] = replace(token, special=token.special or token.content in named)
    return replace(config, added=tuple(added.values()), named=frozenset(named))


def _list(config: TokenizerConfig, key: str) -> list[Any]:
    value = config.values.get(key) or []
    if isinstance(value, Mapping):  # of names, see _tables
        value = list(value.values())
    if not isinstance(value, list):
        raise TokenizerError(f"{config.path}: {key} must be a list, not {format_value(value)}")
    return value


def _named(config: TokenizerConfig) -> Iterator[AddedToken]:
    """Tokens with a name of their own: transformers makes them special, unlike those of lists."""
    for key, value in config.values.items():
        is_other = key.endswith("_token") and (isinstance(value, str) or _is_token(value))
        if value is not None and (key in NAMED_TOKENS or is_other):
            yield _added(config.path, value)
    for key in _TABLES:
        table = config.values.get(key)
        if isinstance(table, Mapping):
            for entry in table.values():
                yield _added(config.path, entry)


def _is_token(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _unnamed(config: TokenizerConfig) -> Iterator[AddedToken]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        for entry in _list(config, key):
            yield _added(config.path, entry)


def _decoder(config: TokenizerConfig) -> Iterator[AddedToken]:
    entries = config.values.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping):
        raise TokenizerError(f"{config.path}: added_tokens_decoder must be an object")
    for id, entry in entries.items():
        if not (id.isascii() and id.isdecimal() and len(id) < 10 and int(id) < MAX_TOKENS):
            raise TokenizerError(f"{config.path}: added_tokens_decoder has {id[:50]!r} for an id")
        yield _added(config.path, entry, int(id), special=False)


def _added(path: Path, entry: Any, id: int | None = None, special: bool = True) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, id, special)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise TokenizerError(
            f"{path}: a token must be a string or have a content, not {format_value(entry)}"
        )
    flags = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word")}
    return AddedToken(entry["content"], id, bool(entry.get("special", special)), **flags)


def special_ids(config: TokenizerConfig, find: Callable[[str], int | None]) -> SpecialTokens:
    """bos, eos, pad, unk and mask, from the configuration or by their usual names.

    Every id of generation_config.json's eos_token_id ends a text, and so does eos_token;
    config.json's list counts if that file has none, as in transformers.
    """

    def named(key: str) -> int | None:
        name = config.text(key)
        if name is not None:
            return find(name)
        return next((id for n in _USUAL_NAMES.get(key, ()) if (id := find(n)) is not None), None)

    eos = [named("eos_token"), *_ids(config, config.generation, "generation_config.json")]
    if not any(id is not None for id in eos):
        eos = list(_ids(config, _text_model(config.model), "config.json"))
    elif config.generation.get("eos_token_id") is None:
        own = _text_model(config.model).get("eos_token_id")
        eos += [id for id in (own if isinstance(own, list) else [own]) if _is_id(id)]
    return SpecialTokens(
        bos=named("bos_token"),
        eos=tuple(dict.fromkeys(id for id in eos if id is not None)),
        pad=named("pad_token"),
        unk=named("unk_token"),
        mask=named("mask_token"),
        user=_id(config, "user_token_id"),
        assistant=_id(config, "assistant_token_id"),
    )


def _text_model(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of config.json, for multimodal models."""
    inner = model.get("text_config")
    return model if "eos_token_id" in model or not isinstance(inner, Mapping) else inner


def find_named(config: TokenizerConfig, key: str, find: Callable[[str], int | None]) -> int | None:
    """The id of cls_token, sep_token, ..., by the configuration or its usual name."""
    names = [config.text(key)] if config.text(key) else list(_USUAL_NAMES.get(key, ()))
    return next((id for name in names if name and (id := find(name)) is not None), None)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKENS


def _id(config: TokenizerConfig, key: str) -> int | None:
    value = config.generation.get(key)
    if value is not None and not _is_id(value):
        where = config.path.with_name("generation_config.json")
        raise TokenizerError(f"{where}: {key} must be an id, not {format_value(value)}")
    return value


def _ids(config: TokenizerConfig, values: Mapping[str, Any], file: str) -> Iterator[int]:
    found = values.get("eos_token_id")
    for id in found if isinstance(found, list) else [found]:
        if id is None:
            continue
        if not _is_id(id):
            where = config.path.with_name(file)
            raise TokenizerError(
                f"{where}: eos_token_id must be an id or a list of ids, not {format_value(id)}"
            )
        yield id


_M2M100 = re.compile(r"__([a-z]{2,3})__")
_M2M100_CODES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
    "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
    "ur uz vi wo xh yi yo zh zu"
)
# In the order of their ids, for a folder that does not list them.
M2M100_LANGUAGES = [f"__{code}__" for code in _M2M100_CODES.split()]

_LOCALE = re.compile(r"[a-z]{2,3}_([A-Z]{2}|[A-Z][a-z]{3})")


def languages(config: TokenizerConfig, find: Callable[[str], int | None]) -> dict[str, int]:
    """Language name -> id: the special tokens that look like languages and have an id."""
    result: dict[str, int] = {}
    for token in [added.content for added in config.added] + M2M100_LANGUAGES:
        short = _M2M100.fullmatch(token)
        id = find(token)
        if id is not None and (short or _LOCALE.fullmatch(token)):
            result[short[1] if short else token] = id
    return result
