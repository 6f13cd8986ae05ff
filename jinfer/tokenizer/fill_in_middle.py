"""Fill-in-the-middle (FIM): the prompt for what belongs between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.tokenizer.fim_tokens import FimTokens
from jinfer.tokenizer.tokenizer_base import Tokenizer, TokenizerError

_PROBE = "\u263a"  # a text that is never joined to what follows it


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    *,
    room: int | None = None,
) -> list[int]:
    """A prompt after which a model writes what belongs between two texts.

    Special tokens that are written in the texts are plain text.

    Args:
        prefix: the part before the gap: a text, or token ids.
        suffix: the part after it.
        files: (name, text) of other files of the repository, which come first.
        room: tokens that the prompt may have. What is too long loses the beginning of the files
            first, then the prefix its beginning and the suffix its end, three to one.

    Raises:
        TokenizerError: the vocabulary has no FIM tokens.
    """
    tokens = tokenizer.fim
    if tokens is None:
        raise TokenizerError(
            "the model's vocabulary has no tokens for fill-in-the-middle; leave the suffix out, "
            "or use a model that was trained to fill in"
        )
    before = tokenizer.encode_parts([prefix]) if isinstance(prefix, str) else list(prefix)
    after, context = continued(tokenizer, suffix), _context(tokenizer, tokens, files)
    if room is not None:
        room = max(0, room - len(tokenizer.special.prefix) - 3)
        before = _last(before, max(room - room // 4, room - len(after)))
        after = after[: room - len(before)]
        context = _last(context, room - len(before) - len(after))
    first, second = [tokens.prefix, *before], [tokens.suffix, *after]
    if tokens.order == "spm":
        first, second = second, first
    middle = [] if tokens.middle is None else [tokens.middle]
    return [*tokenizer.special.prefix, *context, *first, *second, *middle]


def _last(ids: list[int], count: int) -> list[int]:
    return ids[max(0, len(ids) - count) :]


def continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that continues another one: without the space before a text's beginning.

    As CodeLlama's and Mistral's own code encodes a suffix.
    """
    if not text or not tokenizer.strip_space:
        return list(tokenizer.encode_parts([text]))
    head, ids = tokenizer.encode_parts([_PROBE]), tokenizer.encode_parts([_PROBE + text])
    whole = ids[: len(head)] == head
    return list(ids[len(head) :] if whole else tokenizer.encode_parts([text]))


def _context(
    tokenizer: Tokenizer, tokens: FimTokens, files: Sequence[tuple[str, str]]
) -> list[int]:
    """Other files of a repository, as Qwen2.5-Coder and StarCoder 2 were shown them."""
    if not files:
        return []
    ids: list[int] = []
    if tokens.repository is not None:
        ids += [tokens.repository, *continued(tokenizer, "repository\n")]
    for name, text in files:
        if tokens.separator is None:
            ids += continued(tokenizer, f"\n\n--- {name} ---\n\n{text}")
        else:
            ids += [tokens.separator, *continued(tokenizer, f"{name}\n{text}")]
    if tokens.separator is not None:
        ids += [tokens.separator, *continued(tokenizer, "current\n")]
    else:
        ids += continued(tokenizer, "\n\n")
    return ids
