"""Language tokens of translation models: M2M100's `__en__`, mBART's `en_XX`, NLLB's `eng_Latn`."""

from __future__ import annotations

import re
from collections.abc import Callable

from jinfer.tokenizer.tokenizer_config import TokenizerConfig

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
