"""Edits of a trace: those of requests, and of scores, patterns and an encoder's values as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jinfer.api.activation_checks import all_edits, edited_shapes
from jinfer.api.activation_names import nearest
from jinfer.engine.activation_use import ActivationUse, place_edits
from jinfer.engine.requests import RequestError
from jinfer.modelspec.spec_errors import show_value
from jinfer.nn.activation_shapes import ActivationShape
from jinfer.sampling.activation_edits import OPEN, Edit, token_range
from jinfer.sampling.sampling_params import SamplingParams

_OF_KEYS = ("heads", "tokens", "keys")


def edited_keys(sampling: SamplingParams, known: Mapping[str, ActivationShape]) -> list[str]:
    """The scores and patterns that are edited."""
    names = {edit.name for edit in all_edits(sampling)} & known.keys()
    return [name for name in names if known[name].axes == _OF_KEYS]


def traced_edits(
    sampling: SamplingParams,
    known: Mapping[str, ActivationShape],
    prompt: int,
    tokens: int,
    keys: int,
    seen: Mapping[str, int],
) -> ActivationUse | None:
    """The edits of a trace; None: none.

    Args:
        sampling: has `edits` and `steer`.
        known: the values of the stack that is computed.
        prompt, tokens: of the prompt, and of prompt and answer together.
        keys: width of scores and patterns in the program.
        seen: how many keys there are of each score and pattern.

    Raises:
        RequestError: a name or a shape that the model has not.
    """
    edits, shapes = list[Edit](), dict[str, tuple[int, ...]]()
    for edit in all_edits(sampling):
        _check_range(edit, prompt, tokens)
        shape = known.get(edit.name)
        beside = not any(name.startswith("encoder.") for name in known)
        if shape is None and beside and edit.name.startswith("encoder."):
            raise RequestError(
                f"{edit.field}: {edit.name} is computed once for all requests with the same text, "
                "and cannot be edited"
            )
        if shape is None and "*" in edit.name:
            edited_shapes([edit], known)  # which says what is wrong
        if shape is None:
            raise RequestError(
                f"{edit.field}: no value {show_value(edit.name)} is computed here"
                f"{nearest(edit.name, known)}"
            )
        if shape.axes == _OF_KEYS:
            heads = shape.sizes[0]
            assert isinstance(heads, int), "tokens and keys alone are free"
            begin, end = token_range(edit.tokens, prompt)
            whole = slice(begin, tokens if end == OPEN else end)
            _check_keys(edit, heads, max(0, whole.stop - begin), seen[edit.name])
            edits.append(_by_token(edit, whole, keys))
            shapes[edit.name] = heads, keys
        elif shape.of_token is not None:
            edits.append(edit)
            shapes[edit.name] = shape.of_token
        else:
            shapes |= edited_shapes([edit], known)  # which says what is wrong
    return ActivationUse.of((), place_edits(edits, shapes, prompt)) if edits else None


def _check_range(edit: Edit, prompt: int, tokens: int) -> None:
    """Raises `RequestError` if an edit concerns none of the tokens."""
    begin, _ = token_range(edit.tokens, prompt)
    if begin < tokens:
        return
    if edit.tokens == "answer":
        raise RequestError(
            f'{edit.field}: {edit.name}: tokens="answer", and there is no answer to the '
            f"{tokens} tokens here; give 'all' or a slice, or have it generated: max_tokens"
        )
    raise RequestError(
        f"{edit.field}: {edit.name}: tokens is {show_value(edit.tokens)}, and there are "
        f"{tokens} tokens"
    )


def _check_keys(edit: Edit, heads: int, tokens: int, keys: int) -> None:
    """Raises `RequestError` if an edit has not the shape of some tokens' scores."""
    each = [heads] if edit.head is None else []
    allowed = [[*each, tokens, keys], [*each, keys]]
    shape = list(edit.value.shape)
    if shape and not any(shape[:-1] == a[:-1] and 0 < shape[-1] <= keys for a in allowed):
        raise RequestError(
            f"{edit.field}: {edit.name}: the value has shape {shape}; give a number, or "
            f"{allowed[0]}: {'heads, ' if each else ''}tokens, keys"
        )


def _by_token(edit: Edit, whole: slice, keys: int) -> Edit:
    """An edit of [heads, tokens, keys], or of a head's [tokens, keys], with tokens first.

    What lies beyond the keys of a trace is seen by no token.
    """
    value = edit.value
    if value.ndim == 0:
        return edit
    value = value.swapaxes(0, 1) if value.ndim == 3 else value
    missing = [(0, 0)] * (value.ndim - 1) + [(0, keys - value.shape[-1])]
    return replace(edit, value=np.pad(value, missing), tokens=whole)
