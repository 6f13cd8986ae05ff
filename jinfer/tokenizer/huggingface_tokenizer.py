"""Hugging Face `tokenizers`: tokenizer.json, byte-level BPE (merges.txt), WordPiece (vocab.txt)."""

from __future__ import annotations

import json
import logging
import re
import threading
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jinfer.tokenizer.piece_bytes import from_decoder, plain
from jinfer.tokenizer.pretokenizers import PRE_TOKENIZERS, splitter
from jinfer.tokenizer.tokenizer_base import (
    MARK,
    SpecialTokens,
    Tokenizer,
    TokenizerError,
    library_errors,
    valid_text,
)
from jinfer.tokenizer.tokenizer_config import (
    MAX_TOKENS,
    AddedToken,
    TokenizerConfig,
    find_named,
    languages,
    read_file,
    read_lines,
    read_vocabulary,
    special_ids,
)
from jinfer.tokenizer.tokenizer_json_checks import check_merges, check_pipeline, misfit

_log = logging.getLogger("jinfer")
_LARGE_NUMBER = re.compile(rb"[:,\[]\s*\d{8}")
_LONG_TEXT = 1 << 14  # characters from which a text is encoded without holding the GIL
_PROBE = "a"  # a text that no normalizer removes
_MAX_FRAME = 64  # of special tokens around a text

type _Marked = tuple[tokenizers.Tokenizer, Mapping[int, int]]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with a model's special tokens around the text."""

    def __init__(
        self,
        path: Path,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        vocab_size: int,
        spelled: Mapping[int, bytes] | None = None,
    ) -> None:
        """Wraps a backend.

        Args:
            spelled: bytes of tokens whose names in the backend do not determine them.

        Raises:
            TokenizerError: its decoder is not supported.
        """
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        try:
            surface = from_decoder(json.loads(state))
        except (KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{path}: decoder: {error}") from None
        super().__init__(vocab_size, special, surface)
        if surface.added_as_text:
            self._bytes.update({id: plain(name) for name, id in special.parsed.items()})
        self._bytes.update(spelled or {})
        self.backend = backend
        self._path = path
        self._literal: tokenizers.Tokenizer | None = None
        self._marked: _Marked | None = None
        self._lock = threading.Lock()

    def token(self, id: int) -> str:
        return (self.backend.id_to_token(id) or "") if 0 <= id < self.vocab_size else ""

    def id(self, token: str) -> int | None:
        result: int | None = self.backend.token_to_id(token)
        return result

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        literal = not parse_special and self._control is not None and self._control.search(text)
        return self._run(self._literal_backend() if literal else self.backend, text)

    def _run(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        with library_errors(self._path, "cannot encode this text"):
            if len(text) < _LONG_TEXT:
                ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            else:  # releases the GIL, which `encode` does not
                ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if ids and max(ids) >= self.vocab_size and backend is self.backend:
            raise TokenizerError(
                f"{self._path}: has a token of id {max(ids)}, but {self.vocab_size} tokens"
            )
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """See `Tokenizer.encode_marked`.

        The library may treat the text after a special token unlike a beginning. So the text is
        encoded whole, and the special tokens that count are renamed.
        """
        text = valid_text(text)
        if self._control is None or MARK not in text:
            return self._encode(text, True)
        (backend, renamed), whole, place = self._marked_backend(), list[str](), 0
        for found in self._control.finditer(text):
            whole += [text[place : found.start()].replace(MARK, ""), MARK, found[0]]
            place = found.end()
        whole.append(text[place:].replace(MARK, ""))
        ids = self._run(backend, "".join(whole))
        if self._control_ids & set(ids):  # encoded from plain text
            pieces = (piece for part in self.split_special(text) for piece in _pieces(part))
            return self.encode_parts(list(pieces))
        return [renamed.get(id, id) for id in ids]

    def _marked_backend(self) -> _Marked:
        with self._lock, library_errors(self._path, "cannot be copied"):
            if self._marked is None:
                self._marked = _with_marks(self.backend)
            return self._marked

    def _literal_backend(self) -> tokenizers.Tokenizer:
        # A copy, because the switch is on the backend, which other threads use.
        with self._lock, library_errors(self._path, "cannot be copied"):
            if self._literal is None:
                self._literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
                self._literal.encode_special_tokens = True
            return self._literal

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        if self.backend.post_processor is None:  # of a vocabulary that says nothing of pairs
            return super().encode_pair(first, second)
        with library_errors(self._path, "cannot encode these texts"):
            encoded = self.backend.encode(valid_text(first), valid_text(second))
        return encoded.ids, encoded.type_ids


def _with_marks(backend: tokenizers.Tokenizer) -> _Marked:
    """A copy whose special tokens have names that begin with `MARK`; its ids of them -> ours."""
    described = json.loads(backend.to_str())
    described["post_processor"] = None  # it may refer to the tokens by name
    original: dict[str, int] = {}
    for token in described["added_tokens"]:
        if token["special"]:
            name = MARK + token["content"]
            original[name] = token["id"]
            token.update(content=name, normalized=False)
    marked = tokenizers.Tokenizer.from_str(json.dumps(described))
    ids = {id: marked.token_to_id(name) for name, id in original.items()}
    return marked, {new: id for id, new in ids.items() if new is not None}


def _pieces(part: int | str) -> list[int | str]:
    """A part of a text, split where a name is hidden."""
    return [part] if isinstance(part, int) else [piece for piece in part.split(MARK) if piece]


def load_tokenizer_json(path: Path, config: TokenizerConfig) -> HuggingFaceTokenizer:
    """Load a tokenizer.json. Raises `TokenizerError`."""
    data = read_file(path).removeprefix(BOM_UTF8)
    check_merges(path, data)
    with library_errors(path, "not a tokenizer.json"):
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception:
            if reason := misfit(data):
                raise TokenizerError(f"{path}: {reason}"[:500]) from None
            raise
    # The ids are scanned only if one may be too high, because a scan is slow. An id near 2^31 would
    # make the library loop up to it when it serializes the tokenizer.
    if _LARGE_NUMBER.search(data) and _highest_id(backend) >= MAX_TOKENS:
        raise TokenizerError(
            f"{path}: has a token of id {_highest_id(backend)}, which no model has"
        )
    del data
    backend.no_padding()  # sentence encoders store their training's padding and truncation
    backend.no_truncation()
    return _finish(path, backend, config)


def load_vocab_merges(folder: Path, config: TokenizerConfig) -> HuggingFaceTokenizer:
    """Load byte-level BPE from vocab.json and merges.txt (GPT-2). Raises `TokenizerError`."""
    file = folder / "merges.txt"
    merges = []
    for number, line in enumerate(read_lines(file), 1):
        pair = line.split(" ")
        if pair == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2:
            raise TokenizerError(f"{file}, line {number}: a merge is two tokens, not {line[:80]!r}")
        merges.append((pair[0], pair[1]))
    vocabulary = read_vocabulary(folder / "vocab.json")
    with library_errors(file, "its merges do not fit vocab.json"):
        bpe = models.BPE(vocab=vocabulary, merges=merges)
    backend = tokenizers.Tokenizer(bpe)
    rule = PRE_TOKENIZERS["qwen2" if config.kind == "Qwen2Tokenizer" else "gpt-2"]
    backend.normalizer = normalizers.NFC() if rule.nfc else None
    backend.pre_tokenizer = splitter(rule, bool(config.flag("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()
    _frame_like_roberta(backend, config)
    return _finish(folder / "vocab.json", backend, config)


def _frame_like_roberta(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """RoBERTa's <s> text </s>, and </s></s> between a pair, for tokenizer classes that do so."""
    if not config.kind.startswith(("Roberta", "Bart", "LED", "Longformer", "Blenderbot")):
        return
    find = backend.token_to_id
    cls, sep = config.text("cls_token") or "<s>", config.text("sep_token") or "</s>"
    first, last = find(cls), find(sep)
    if first is None or last is None:
        raise TokenizerError(f"{config.path}: cls_token and sep_token must be in the vocabulary")
    backend.post_processor = processors.RobertaProcessing((sep, last), (cls, first))
    mask = config.text("mask_token") or "<mask>"
    if find(mask) is not None:  # it absorbs the space before it, like a word
        backend.add_special_tokens([tokenizers.AddedToken(mask, lstrip=True, normalized=False)])


def load_vocab_txt(path: Path, config: TokenizerConfig) -> HuggingFaceTokenizer:
    """Load WordPiece from vocab.txt (BERT): line n is token n. Raises `TokenizerError`."""
    tokens = read_lines(path)
    if tokens[-1] == "":
        tokens.pop()
    lowercase = config.flag("do_lower_case")
    if lowercase is None:  # transformers defaults to true, which is wrong for old cased models
        lowercase = not any(
            token != token.lower() and not token.startswith("[") for token in tokens
        )
    chinese = config.flag("tokenize_chinese_chars")
    backend = word_piece(
        path,
        {token: id for id, token in enumerate(tokens)},
        unk=config.text("unk_token") or "[UNK]",
        normalizer=normalizers.BertNormalizer(
            handle_chinese_chars=chinese is not False,
            strip_accents=config.flag("strip_accents"),
            lowercase=lowercase,
        ),
    )
    find = backend.token_to_id
    frame_like_bert(
        backend, find_named(config, "cls_token", find), find_named(config, "sep_token", find)
    )
    return _finish(path, backend, config)


def word_piece(
    path: Path, vocabulary: dict[str, int], unk: str, normalizer: normalizers.Normalizer
) -> tokenizers.Tokenizer:
    """A WordPiece backend (BERT), without special tokens. Raises `TokenizerError`."""
    if unk not in vocabulary:
        raise TokenizerError(f"{path}: the vocabulary has no {unk!r}, which WordPiece needs")
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unk))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def frame_like_bert(backend: tokenizers.Tokenizer, cls: int | None, sep: int | None) -> None:
    """BERT's [CLS] first [SEP] second [SEP], types 0 and 1; nothing if the tokens are missing."""
    if cls is None or sep is None:
        return
    names = [(backend.id_to_token(cls), cls), (backend.id_to_token(sep), sep)]
    (first, _), (last, _) = names
    backend.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=[f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"],
        special_tokens=names,
    )


def _finish(
    path: Path, backend: tokenizers.Tokenizer, config: TokenizerConfig
) -> HuggingFaceTokenizer:
    """Add the configuration's tokens, and determine the special tokens around a text."""
    _add_tokens(path, backend, config)
    check_pipeline(path, backend)
    added = backend.get_added_tokens_decoder()
    size = _vocab_size(backend, added)
    if size > MAX_TOKENS:
        raise TokenizerError(f"{path}: has a token of id {size - 1}, which no model has")
    special = special_ids(config, backend.token_to_id)
    prefix, suffix = _frame(backend, config, special)
    if len(prefix) + len(suffix) > _MAX_FRAME or max((*prefix, *suffix), default=0) >= size:
        raise TokenizerError(f"{path}: post_processor: puts other tokens around a text than it has")
    bos = special.bos
    if bos is None and len(prefix) == 1 and not suffix:
        bos = prefix[0]  # not configured, but every text starts with it
    special = replace(
        special,
        bos=bos,
        control={token.content: id for id, token in added.items() if token.special},
        parsed={token.content: id for id, token in added.items() if not token.special},
        lstrip=frozenset(token.content for token in added.values() if token.lstrip),
        rstrip=frozenset(token.content for token in added.values() if token.rstrip),
        prefix=prefix,
        suffix=suffix,
        languages=languages(config, backend.token_to_id),
    )
    return HuggingFaceTokenizer(path, backend, special, size)


def _vocab_size(backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]) -> int:
    """The highest id plus one."""
    count: int = backend.get_vocab_size(with_added_tokens=True)
    if count == 0 or backend.id_to_token(count - 1) is not None:
        return max([count, *(id + 1 for id in added)])
    return _highest_id(backend) + 1  # ids have gaps


def _highest_id(backend: tokenizers.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _add_tokens(path: Path, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    _make_special(backend, config.named)
    known = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    new: list[AddedToken] = []
    for token in sorted(config.added, key=lambda token: token.id if token.id is not None else -1):
        id = known.get(token.content, backend.token_to_id(token.content) if token.content else None)
        if not token.content or (id is None and token.id is None):
            continue  # the model has no embedding for it
        if None not in (id, token.id) and id != token.id:
            if path.name != "tokenizer.json":
                raise _other_id(path, config, token, id)
            _log.warning("%s; the former is used", _other_id(path, config, token, id))
        if token.content not in known:
            new.append(token if id is None else replace(token, id=id))
    # All at once, because each call of the library processes all its tokens.
    for special, tokens in groupby(new, key=lambda token: token.special):
        made = [_made(token) for token in tokens]
        (backend.add_special_tokens if special else backend.add_tokens)(made)
    for token in new:
        if (id := backend.token_to_id(token.content)) != token.id:
            raise _other_id(path, config, token, id)


def _make_special(backend: tokenizers.Tokenizer, named: Collection[str]) -> None:
    """Make added tokens with a name special, even if tokenizer.json says they are not."""
    wrong = [
        token
        for token in backend.get_added_tokens_decoder().values()
        if token.content in named and not token.special
    ]
    for token in wrong:
        token.special = True
    backend.add_special_tokens(wrong)


def _made(token: AddedToken) -> tokenizers.AddedToken:
    flags = {name: value for name, value in vars(token).items() if name not in ("content", "id")}
    return tokenizers.AddedToken(token.content, **flags)


def _other_id(
    path: Path, config: TokenizerConfig, token: AddedToken, id: int | None
) -> TokenizerError:
    other = f"{config.path.name} says {token.id}"
    return TokenizerError(f"{path}: token {token.content!r} has id {id}, but {other}")


def _frame(
    backend: tokenizers.Tokenizer, config: TokenizerConfig, special: SpecialTokens
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids around a text: the post-processor's, unless a flag overrides them."""
    plain = backend.encode(_PROBE, add_special_tokens=False).ids
    whole = backend.encode(_PROBE).ids
    extra = len(whole) - len(plain)
    starts = (at for at in range(extra + 1) if whole[at : at + len(plain)] == plain)
    at = next(starts, 0)
    prefix, suffix = tuple(whole[:at]), tuple(whole[at + len(plain) :])
    add_bos, add_eos = config.flag("add_bos_token"), config.flag("add_eos_token")
    if add_bos is not None and special.bos is not None:
        prefix = (special.bos,) if add_bos else tuple(id for id in prefix if id != special.bos)
    eos = backend.token_to_id(config.text("eos_token") or "")
    if add_eos is not None and eos is not None:
        suffix = (eos,) if add_eos else tuple(id for id in suffix if id != eos)
    return prefix, suffix
