"""Requests as arrays: a row for each, of the same widths whatever it asks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax import Array

from jinfer.sampling.param_names import STAGES
from jinfer.sampling.param_ranges import (
    MAX_BAD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_BREAKERS,
    MAX_END_IDS,
)
from jinfer.sampling.sampler_chain import chain
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.sampling.token_history import History

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt

# The parameters that the device looks at, a column each.
NUMBERS = (
    "scale",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_p",
    "min_p",
    "typical_p",
    "tfs_z",
    "top_a",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "fsd_alpha",
    "fsd_beta",
    "random_fsd_probability",
)
COUNTS = (
    "draws",
    "ignore_eos",
    "min_tokens",
    "top_k",
    "mirostat",
    "penalty_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "fsd_k",
    "fsd_n",
    "fsd_pool",
    "random_fsd_tokens",
)
LAST_STAGE = len(STAGES)  # what follows the stages of a row

type Encode = Callable[[str], Sequence[int]]


class Sampler(NamedTuple):
    """Parameters of a batch, a row each; few arrays, because each costs a call some time.

    Attributes:
        numbers, counts: columns named by `NUMBERS` and `COUNTS`.
        key: the seed.
        stages: indices into `STAGES` in the row's order, then `LAST_STAGE`.
        end_ids: what ends the sequence; -1 where there is none, as in all lists of ids.
        bias_ids, biases: what is added to which logit.
        bad_words: sequences that are not completed, with -1 in front.
        breakers: tokens that DRY's matches do not cross.
    """

    numbers: Float[Array, "rows numbers"]
    counts: Int[Array, "rows counts"]
    key: UInt[Array, "rows 2"]
    stages: Int[Array, "rows stages"]
    end_ids: Int[Array, "rows ends"]
    bias_ids: Int[Array, "rows biased"]
    biases: Float[Array, "rows biased"]
    bad_words: Int[Array, "rows words tokens"]
    breakers: Int[Array, "rows breakers"]

    def number(self, name: str) -> Float[Array, " rows"]:
        """A column of `numbers`."""
        return self.numbers[:, NUMBERS.index(name)]

    def whole(self, name: str) -> Int[Array, " rows"]:
        """A column of `counts`."""
        return self.counts[:, COUNTS.index(name)]


class Progress(NamedTuple):
    """What changes as tokens are chosen.

    Attributes:
        drawn: tokens of the answer so far.
        mu: mirostat's greatest surprise, in bits.
    """

    drawn: Int[Array, " rows"]
    mu: Float[Array, " rows"]


class Turn(NamedTuple):
    """What a stage is given besides logits.

    Attributes:
        stage: its index in `STAGES`: one function may serve several.
        history: of the rows whose turn it is; the others' is empty.
    """

    stage: Int[Array, ""]
    sampler: Sampler
    progress: Progress
    history: History


def sampler_row(
    params: SamplingParams, end_ids: Iterable[int], vocab: int, encode: Encode | None = None
) -> Sampler:
    """A batch of one, in NumPy's arrays.

    Args:
        end_ids: ids that end the sequence; forbidden until `min_tokens`.
        vocab: tokens of the vocabulary.
        encode: a text's ids, without what the model wants around a text.

    Raises:
        ValueError: an id outside the vocabulary; more ids than a row has room for; texts without
            a tokenizer.
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
    numbers = np.array([[getattr(params, name) for name in NUMBERS]], np.float64)
    counts = [[getattr(params, name) for name in COUNTS]]
    order = [STAGES.index(name) for name in chain(params)]
    parts: tuple[Any, ...] = (
        # A number that float32 would take for 0 is not 0.
        np.where(numbers > 0, np.maximum(numbers, 1e-37), numbers).astype(np.float32),
        np.array(counts, np.int32),
        np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32),
        _listed(order, len(STAGES), LAST_STAGE),
        _listed(ends, MAX_END_IDS),
        _listed(bias, MAX_BIASED),
        biases,
        _bad_words(params, vocab, encode),
        _listed(_breakers(params, vocab, encode), MAX_BREAKERS),
    )
    return Sampler(*parts)


def progress_row(params: SamplingParams, drawn: int = 0) -> Progress:
    """The beginning of a request, in NumPy's arrays; or where it is after some tokens.

    Mirostat begins anew there: its surprise is not known from the tokens alone.
    """
    mu = np.array([2 * params.mirostat_tau], np.float32)
    parts: tuple[Any, ...] = (np.array([drawn], np.int32), mu)
    return Progress(*parts)


def empty_sampler(rows: int) -> Sampler:
    """Rows that nobody uses: greedy."""
    return _repeated(sampler_row(SamplingParams(seed=0), (), 1), rows)


def empty_progress(rows: int) -> Progress:
    """The progress of rows that nobody uses."""
    return _repeated(progress_row(SamplingParams()), rows)


def _repeated(row: Any, rows: int) -> Any:
    each = (np.repeat(part, rows, axis=0) for part in row)
    return type(row)(*(jax.device_put(part, may_alias=False) for part in each))


def mask_words(vocab: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab // 32)


def allowed_mask(params: SamplingParams, vocab: int) -> UInt[np.ndarray, " words"] | None:
    """The bits of `allowed_token_ids`, the lowest of a word first; None where all are allowed.

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
    """A word at a text's beginning and after a space, where these are different tokens."""
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
    """A text breaks by the last of its tokens; what stands before it may change the others."""
    if not params.dry_multiplier:
        return []
    ids = {b for b in params.dry_sequence_breakers if isinstance(b, int)}
    for text in (b for b in params.dry_sequence_breakers if isinstance(b, str)):
        ids.update(_text_ids("dry_sequence_breakers", f"a{text}", encode)[-1:])
    _check("dry_sequence_breakers", ids, vocab)
    return sorted(ids)
