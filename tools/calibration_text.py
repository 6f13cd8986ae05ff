"""Calibration text for GPTQ and imatrix: a text as windows of token ids."""

from __future__ import annotations

import numpy as np

from jinfer.engine.requests import RequestError
from jinfer.loader.open_model import Opened
from jinfer.loader.weights.layer_forward import Texts, in_batches, with_firsts

LENGTH = 512  # tokens of a window


def text_windows(opened: Opened, text: str, most: int, length: int = LENGTH) -> list[Texts]:
    """Batches of token ids; an incomplete last window is dropped.

    Args:
        opened: the model that reads it.
        most: max tokens, before some of them are repeated as first ones.
        length: tokens per window.

    Raises:
        RequestError: the text is too short, or the model reads text pairs.
    """
    if len(opened.spec.stacks) != 1:
        raise RequestError("calibration is for a model with an encoder or a decoder alone")
    if opened.tokenizer is None:
        raise RequestError("the model has no tokenizer for the calibration text")
    length = min(length, opened.context)
    some = opened.tokenizer.encode(text)[:most]
    ids = np.asarray(some[: len(some) // length * length], np.int32).reshape(-1, length)
    if not len(ids):
        raise RequestError("the calibration text is shorter than a window; give a longer one")
    # An encoder sees all of a text from everywhere.
    return in_batches(ids) if opened.spec.decoder is None else with_firsts(ids)
