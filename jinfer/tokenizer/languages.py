"""Language tokens of translation models: M2M100's `__en__`, mBART's `en_XX`, NLLB's `eng_Latn`."""

from __future__ import annotations

import re
from collections.abc import Callable

from jinfer.tokenizer.config import TokenizerConfig

_M2M100 = re.compile(r"__([a-z]{2,3})__")
_LOCALE = re.compile(r"[a-z]{2,3}_([A-Z]{2}|[A-Z][a-z]{3})")


def languages(config: TokenizerConfig, find: Callable[[str], int | None]) -> dict[str, int]:
    """Language name -> id: the special tokens that look like languages and are in the vocabulary."""
    found: dict[str, int] = {}
    for token in config.added:
        short = _M2M100.fullmatch(token.content)
        name = short[1] if short else token.content
        id = find(token.content)
        if id is not None and (short or _LOCALE.fullmatch(token.content)):
            found[name] = id
    return found
