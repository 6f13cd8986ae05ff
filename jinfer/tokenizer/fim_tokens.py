"""FIM tokens (fill-in-the-middle): what marks the text before and after a gap, by tokens' names.

A model that was trained for it writes what belongs between a prefix and a suffix. PSM prompts have
the prefix first, SPM prompts the suffix (Bavarian et al., Efficient Training of Language Models to
Fill in the Middle, 2022). Which tokens mark the parts, and in which order a model expects them,
follows from the names of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Order = Literal["psm", "spm"]

# Names of the tokens before the prefix, the suffix and the middle, and the order of a prompt.
# Without a middle token the text between follows the prefix at once.
NAMES: tuple[tuple[str, str, str, Order], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "psm"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "psm"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "psm"),  # SantaCoder
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
        "psm",
    ),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "psm"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>", "psm"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "psm"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>", "psm"),  # Falcon-H1
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", "spm"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", "", "spm"),  # Codestral
)
REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>")
SEPARATOR = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_PARTS = ("fim_pre", "fim_suf", "fim_mid")
# Tokens that end an answer, besides the end of a sequence.
_ENDS = ("▁<EOT>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<EOT>", "<|EOT|>")


@dataclass(frozen=True)
class FimTokens:
    """The FIM tokens of a vocabulary.

    Attributes:
        prefix, suffix: ids of the tokens before the parts.
        middle: id of the token after both; None if there is none.
        order: which part comes first.
        repository, separator: ids of the tokens before a repository's and before a file's name.
        ends: ids that end the middle.
    """

    prefix: int
    suffix: int
    middle: int | None
    order: Order
    repository: int | None = None
    separator: int | None = None
    ends: tuple[int, ...] = ()


def find_fim_tokens(
    id_of: Callable[[str], int | None],
    name_of: Callable[[int], str] = lambda id: "",
    given: Mapping[str, int] | None = None,
) -> FimTokens | None:
    """The FIM tokens of a vocabulary; None if it has none.

    Args:
        id_of: the id of a token's name; None if there is none.
        name_of: the name of an id.
        given: ids that a file names, by GGUF's keys: fim_pre, fim_suf, fim_mid, fim_rep, fim_sep.
    """
    known = dict(given or {})
    order: Order = "psm"
    if "fim_pre" in known and "fim_suf" in known:
        names = name_of(known["fim_pre"]), name_of(known["fim_suf"])
        row = next((row for row in NAMES if row[:2] == names), None)
        if row is not None:
            order = row[3]
            if not row[2]:
                known.pop("fim_mid", None)
    else:
        for *parts, usual_order in NAMES:
            present = [name for name in parts if name]
            found = [id for id in map(id_of, present) if id is not None]
            if len(found) == len(present):
                order = usual_order
                known.update(zip(_PARTS, found, strict=False))
                break
        else:
            return None
    for key, others in {"fim_rep": REPOSITORY, "fim_sep": SEPARATOR}.items():
        named = [id for id in map(id_of, others) if id is not None]
        if named:
            known.setdefault(key, named[0])
    ends = [*map(id_of, _ENDS), *known.values()]
    return FimTokens(
        known["fim_pre"],
        known["fim_suf"],
        known.get("fim_mid"),
        order,
        known.get("fim_rep"),
        known.get("fim_sep"),
        tuple(dict.fromkeys(id for id in ends if id is not None)),
    )
