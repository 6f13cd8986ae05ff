"""Sampling metadata: requests' parameters as arrays of fixed width, a row each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax import Array

from jinfer.sampling.param_types import (
    MAX_BAD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_BREAKERS,
    MAX_END_IDS,
)
from jinfer.sampling.sampler_chain import chain
from jinfer.sampling.samplers import SAMPLER_NAMES
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt

# The columns of the device's arrays: two that follow from several parameters, then those of the
# table, real numbers and whole ones.
_COLUMNS = tuple(p for p in PARAMETERS.values() if p.column)
NUMBERS = ("temperature", *(p.name for p in _COLUMNS if p.kind is float))
COUNTS = ("draws", *(p.name for p in _COLUMNS if p.kind is not float))
END_OF_CHAIN = len(SAMPLER_NAMES)  # follows the samplers of a row

type Encode = Callable[[str], Sequence[int]]


class SamplingMetadata(NamedTuple):
    """Parameters of a batch, a row each; few arrays, because each argument costs time per call.

    Attributes:
        numbers, counts: columns named by `NUMBERS` and `COUNTS`.
        key: the seed.
        chain: indices into `SAMPLER_NAMES` in the row's order, then `END_OF_CHAIN`.
        end_ids: tokens that end the sequence, then -1, as in all lists of ids.
        bias_ids, biases: tokens, and the biases of their logits.
        bad_words: sequences that must not be completed, with -1 in front.
        breakers: tokens that DRY's matches do not cross.
    """

    numbers: Float[Array, "rows numbers"]
    counts: Int[Array, "rows counts"]
    key: UInt[Array, "rows 2"]
    chain: Int[Array, "rows samplers"]
    end_ids: Int[Array, "rows ends"]
    bias_ids: Int[Array, "rows biased"]
    biases: Float[Array, "rows biased"]
    bad_words: Int[Array, "rows words tokens"]
    breakers: Int[Array, "rows breakers"]

    def column(self, name: str) -> Float[Array, " rows"] | Int[Array, " rows"]:
        """A column of `numbers` or of `counts`."""
        if name in NUMBERS:
            return self.numbers[:, NUMBERS.index(name)]
        return self.counts[:, COUNTS.index(name)]


class SamplerState(NamedTuple):
    """State that changes from token to token.

    Attributes:
        drawn: tokens of the answer so far.
        mu: mirostat's greatest surprise, in bits.
    """

    drawn: Int[Array, " rows"]
    mu: Float[Array, " rows"]


class SamplerContext(NamedTuple):
    """Arguments of a sampler in addition to logits.

    Attributes:
        number: the sampler's index in `SAMPLER_NAMES`: one function may serve several.
        metadata, state, history: one row each; rows that do not need the sampler have empty
            histories.
    """

    number: Int[Array, ""]
    metadata: SamplingMetadata
    state: SamplerState
    history: History


def metadata_row(
    params: SamplingParams, end_ids: Iterable[int], vocab: int, encode: Encode | None = None
) -> SamplingMetadata:
    """Makes a batch of one request, in NumPy arrays.

    Args:
        end_ids: ids that end the sequence; forbidden until `min_tokens`.
        vocab: tokens of the vocabulary.
        encode: a text's token ids, without special tokens.

    Raises:
        ValueError: an id outside the vocabulary; more ids than a row can hold; texts without a
            tokenizer.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ends = sorted({*end_ids, *params.stop_token_ids})
    if len(ends) > MAX_END_IDS:
        raise ValueError(f"{len(ends)} ids end a sequence; at most {MAX_END_IDS} can")
    bias = dict(cast("tuple[tuple[int, float], ...]", params.logit_bias))
    bias |= dict.fromkeys(params.banned_token_ids, -np.inf)
    _check("logit_bias", bias, vocab)
    biases = np.zeros((1, MAX_BIASED), np.float32)
    biases[0, : len(bias)] = list(bias.values())
    values = [params.chain_temperature, *(getattr(params, name) for name in NUMBERS[1:])]
    numbers = np.array([values], np.float64)
    counts = [[getattr(params, name) for name in COUNTS]]
    order = [SAMPLER_NAMES.index(name) for name in chain(params)]
    parts: tuple[Any, ...] = (
        # A nonzero number must not underflow to 0 in float32.
        np.where(numbers > 0, np.maximum(numbers, 1e-37), numbers).astype(np.float32),
        np.array(counts, np.int32),
        np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32),
        _listed(order, len(SAMPLER_NAMES), END_OF_CHAIN),
        _listed(ends, MAX_END_IDS),
        _listed(bias, MAX_BIASED),
        biases,
        _bad_words(params, vocab, encode),
        _listed(_breakers(params, vocab, encode), MAX_BREAKERS),
    )
    return SamplingMetadata(*parts)


def sampler_state_row(params: SamplingParams) -> SamplerState:
    """Returns a request's sampler state at its beginning, in NumPy arrays."""
    mu = np.array([2 * params.mirostat_tau], np.float32)
    parts: tuple[Any, ...] = (np.zeros(1, np.int32), mu)
    return SamplerState(*parts)


def empty_metadata(rows: int) -> SamplingMetadata:
    """Unused rows: greedy."""
    return _repeated(metadata_row(SamplingParams(seed=0), (), 1), rows)


def empty_sampler_state(rows: int) -> SamplerState:
    """The state of unused rows."""
    return _repeated(sampler_state_row(SamplingParams()), rows)


def _repeated(row: Any, rows: int) -> Any:
    parts = (np.repeat(part, rows, axis=0) for part in row)
    return type(row)(*(jax.device_put(part, may_alias=False) for part in parts))


def mask_words(vocab: int) -> int:
    """Returns the number of words of a mask over the vocabulary."""
    return -(-vocab // 32)


def allowed_mask(params: SamplingParams, vocab: int) -> UInt[np.ndarray, " words"] | None:
    """Returns the bits of `allowed_token_ids`, lowest bit first; None: all are allowed.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    if params.allowed_token_ids is None:
        return None
    _check("allowed_token_ids", params.allowed_token_ids, vocab)
    bits = np.zeros(mask_words(vocab) * 32, np.uint8)
    bits[list(params.allowed_token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _check(name: str, ids: Iterable[int], vocab: int) -> None:
    wrong = [id for id in ids if id >= vocab]
    if wrong:
        raise ValueError(f"{name}: token {wrong[0]} is outside the vocabulary of {vocab}")


def _listed(ids: Iterable[int], width: int, filling: int = -1) -> np.ndarray:
    ids = list(ids)
    return np.array([ids + [filling] * (width - len(ids))], np.int32)


def _text_ids(name: str, text: str, encode: Encode | None) -> tuple[int, ...]:
    if encode is None:
        raise ValueError(f"{name}: the checkpoint has no tokenizer for texts; give token ids")
    return tuple(encode(text))


def _bad_words(params: SamplingParams, vocab: int, encode: Encode | None) -> np.ndarray:
    """Encodes a word at a text's beginning and after a space, if the tokens differ."""
    sequences = [tuple(ids) for ids in params.bad_words_ids]
    for word in params.bad_words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequences.append(_text_ids("bad_words", text, encode))
    sequences = [ids for ids in dict.fromkeys(sequences) if ids]
    _check("bad_words", (id for ids in sequences for id in ids), vocab)
    if len(sequences) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words: {len(sequences)} sequences of tokens; at most {MAX_BAD_WORDS} are allowed"
        )
    table = np.full((1, MAX_BAD_WORDS, MAX_BAD_LENGTH), -1, np.int32)
    for row, ids in enumerate(sequences):
        if len(ids) > MAX_BAD_LENGTH:
            raise ValueError(f"bad_words: a word has {len(ids)} tokens; at most {MAX_BAD_LENGTH}")
        table[0, row, -len(ids) :] = ids
    return table


def _breakers(params: SamplingParams, vocab: int, encode: Encode | None) -> list[int]:
    """Returns a breaker's last token, since preceding text may change the other tokens."""
    if not params.dry_multiplier:
        return []
    ids = {b for b in params.dry_sequence_breakers if isinstance(b, int)}
    for text in (b for b in params.dry_sequence_breakers if isinstance(b, str)):
        ids.update(_text_ids("dry_sequence_breakers", f"a{text}", encode)[-1:])
    _check("dry_sequence_breakers", ids, vocab)
    return sorted(ids)
