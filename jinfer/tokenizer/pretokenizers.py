"""Pre-tokenizers: how byte-level BPE splits text into words, by GGUF's `tokenizer.ggml.pre`.

Patterns come from the models' tokenizer.json files or Python code; the names, and which of them
share a pattern, from llama.cpp (`src/llama-vocab.cpp`). Each pattern in turn splits the pieces left
by the one before: a match is a piece, and so is the text between matches. Syntax: Oniguruma, as in
`tokenizers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English suffixes: it's, don't, we're
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _llama3(digits: str, suffixes: str = _SUFFIXES + "|", spaces: str = _SPACES) -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{suffixes}{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{spaces}"


def _cased(digits: str, suffixes: str = "", slash: str = "/", han: str = "") -> str:
    """Words that change case only once: "MiXeD" is "Mi", "Xe", "D"."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{suffixes}|{lead}{upper}+{lower}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|{_SPACES}"


_CASED_SUFFIXES = _SUFFIXES + "?"
_GPT4O = _cased(r"\p{N}{1,3}", _CASED_SUFFIXES)
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# DeepSeek-LLM lists ranges of cased letters, without the newer and rarer blocks.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    r"\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2cf2-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}]]"
)
_JAIS2_SPACES = r"\s*[\r\n]+|" + "|".join(
    rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2", "1")
).replace(r"\s{1}(?!\S)", r"\s{1}")
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_EXAONE_MOE = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = _llama3(r"\p{N}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_AFMOE_CJK = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+"
)
_YOUTU_CJK = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_DEEPSEEK_CJK = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
_NOT_HAN = r"&&[^\p{Han}]"


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer.

    Attributes:
        patterns: split the text in turn.
        ignore_merges: a word that is a token is not merged.
        add_bos: the default if the file has no add_bos_token.
        nfc: the text is NFC-normalized first.
        byte_level: bytes are written with GPT-2's characters; else the vocabulary has plain text,
            with `▁` for a space and `<0xHH>` for bytes.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    byte_level: bool = True


_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 jais "
        "trillion granite-docling roberta-bpe jina-v1-en jina-v2-code",
        PreTokenizer((_GPT2,)),
    ),
    ("mpt olmo modern-bert", PreTokenizer((_GPT2,), nfc=True)),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_llama3(r"\p{N}{1,3}"),))),
    ("jais-2", PreTokenizer((_llama3(r"\p{N}{1,3}", spaces=_JAIS2_SPACES),))),
    ("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", PreTokenizer((_llama3(r"\p{N}"),), nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2", PreTokenizer((_llama3(r"\p{N}"),))),
    ("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?{_DEEPSEEK_LETTERS}+",
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    (
        "youtu",
        PreTokenizer((_YOUTU_CJK, _cased(r"\p{N}", _CASED_SUFFIXES)), ignore_merges=True),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("tekken", PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
    ("tiny_aya", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    (
        "kimi-k2 kimi-k25",
        PreTokenizer(
            (r"\p{Han}+|" + _cased(r"\p{N}{1,3}", _CASED_SUFFIXES, slash="", han=_NOT_HAN),)
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    (
        "afmoe",
        PreTokenizer((r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))", _AFMOE_CJK, _DEEPSEEK3)),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 sarvam-moe", PreTokenizer((r"[^\n]+|\n+",), byte_level=False)),
    ("whitespace", PreTokenizer((r"\S+",), byte_level=False)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for names, rule in _GROUPS for name in names.split()
}


def splitter(rule: PreTokenizer, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """The rule as a pre-tokenizer of the `tokenizers` library."""
    return pre_tokenizers.Sequence(list(_steps(rule, add_prefix_space)))


def _steps(rule: PreTokenizer, add_prefix_space: bool) -> Iterator[pre_tokenizers.PreTokenizer]:
    if rule.patterns == (_GPT2,):  # the library's built-in form is faster
        yield pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return
    for pattern in rule.patterns:
        yield pre_tokenizers.Split(Regex(pattern), "isolated")
    if rule.byte_level:
        yield pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
