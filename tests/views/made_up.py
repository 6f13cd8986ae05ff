"""Views of made-up numbers, with the oddest tokens, and of as many tokens as wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jinfer.engine.output.completion import Completion, TokenLogprob, Usage
from jinfer.engine.output.draft_trace import Steps
from jinfer.engine.scheduling.sequence import DraftedStep
from jinfer.views import View
from jinfer.views.activation_outliers import draw_outliers, largest
from jinfer.views.alternatives_tree import Branch, draw_alternatives
from jinfer.views.attention_maps import draw_patterns
from jinfer.views.draft_trees import draw_speculation
from jinfer.views.logit_attribution import Attribution, draw_attribution
from jinfer.views.logit_lens import Lens, draw_lens
from jinfer.views.memory_use import MemoryUse, draw_memory
from jinfer.views.router_load import ExpertLoads, draw_loads
from jinfer.views.strategy_table import USUAL, Answered, draw_strategies
from jinfer.views.token_likelihoods import draw_tokens
from jinfer.views.weight_errors import WeightErrors, draw_errors

SCRIPT = "</script><script>document.title='run'</script>"
ODD = (
    *(SCRIPT, "<b>&\"'", "]]>", "\n", "\t", " ", "  ", "\r\n", "\x00", "\x1b[31m", "\x7f"),
    *("\ud800", "\ufffe", "\ue000", "\u202e", "\u200f", "\u200d", "\xad", "\xa0", "\u0301\u0302"),
    *("שלום", " مرحبا", "中文字符", "👩‍👩‍👧‍👦", "🇩🇪", "e\u0301", "a" * 120, "W" * 60, "", "ﷺ"),
)
WORDS = ("The", " capital", " of", " France", " is", " Paris", ",", " which", " lies", " on")


def tokens_of(count: int, odd: bool) -> list[str]:
    """So many tokens."""
    every = ODD if odd else WORDS
    return [every[at % len(every)] for at in range(count)]


def entries(tokens: list[str], chance: np.random.Generator) -> list[TokenLogprob]:
    """Tokens with log-probabilities and alternatives."""
    made = []
    for at, token in enumerate(tokens):
        others = [tokens[(at + step) % len(tokens)] for step in range(1, 4)]
        logprobs = sorted(-chance.exponential(1.5, 4), reverse=True)
        top = tuple(
            TokenLogprob(100 + at + step, text, float(logprob))
            for step, (text, logprob) in enumerate(zip(others, logprobs, strict=False))
        )
        made.append(TokenLogprob(at, token, float(logprobs[-1]), top))
    return made


def views(count: int = 9, layers: int = 3, heads: int = 4, odd: bool = True) -> Mapping[str, View]:
    """One view of each kind, by the name that `jinfer look` has for it."""
    chance = np.random.default_rng(5)
    tokens = tokens_of(count, odd)
    scored = entries(tokens, chance)
    ids = chance.integers(0, count, (layers + 1, count, 3))
    logprobs = -np.sort(chance.exponential(2, ids.shape), axis=-1)
    lens = Lens(
        ["embed", *map(str, range(layers))],
        tokens,
        ids,
        logprobs,
        dict(enumerate(tokens)),
        -chance.exponential(2, (layers + 1, count - 1)),
    )
    patterns = np.tril(chance.exponential(1, (heads, count, count)) ** 3)
    patterns /= patterns.sum(-1, keepdims=True)
    added, by_head = chance.normal(0, 1, (layers, 2)), chance.normal(0, 0.5, (layers, heads))
    added[0, 1] = by_head[1, :] = np.nan
    matrices = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
    names = [f"decoder.{layer}.{name}" for layer in range(layers) for name in matrices]
    errors = {name: float(chance.exponential(0.03)) for name in names} | {"embed": 0.012}
    places = {
        f"decoder.{layer}.{place}": largest(chance.standard_t(3, (count, 32)))
        for layer in range(layers)
        for place in ("x", "attn.input", "ffn.input")
    }
    weights = {f"{name}.weight": 500_000 + 90_000 * at for at, name in enumerate(names)}
    weights |= {"embed.weight": 28_000_000, "decoder.norm.weight": 2304}
    usage = Usage(9, count, 0.2, 0.5)
    logged = Completion("".join(tokens), list(range(count)), scored, "length", usage)
    plain = Completion("".join(tokens), [3] * count, None, "stop", usage)
    steps = [
        DraftedStep((1, 2, 3), (-1, 0, 0), ("ngram", "ngram", "suffix"), (0, 2), (1, 3, 7)),
        DraftedStep((5,), (-1,), ("suffix",), (), (8,)),
    ]  # fmt: skip
    return {
        "tokens": draw_tokens(tokens[0], scored, scored[: count // 2]),
        "lens": draw_lens(lens),
        "patterns": draw_patterns(patterns, tokens, "decoder.1.attn"),
        "attribution": draw_attribution(
            Attribution("logit of ␣Paris", 0.4, ("attn", "ffn"), added, by_head, 0.1, 3.2)
        ),
        "experts": draw_loads(
            ExpertLoads([f"{n}.ffn" for n in range(layers)], chance.poisson(3, (layers, 8)), count)
        ),
        "many_experts": draw_loads(
            ExpertLoads([f"{n}.ffn" for n in range(layers)], chance.poisson(1, (layers, 96)), count)
        ),
        "quantization": draw_errors(
            WeightErrors(errors, dict.fromkeys(names, "q4_b32"), dict.fromkeys(range(layers), 0.1))
        ),
        "outliers": draw_outliers(places, tokens),
        "memory": draw_memory(
            MemoryUse(weights, {"all": 90_000_000, "state": 4_000_000}, 4096, 0.25)
        ),
        "alternatives": draw_alternatives(
            "".join(tokens),
            scored,
            [Branch(1, scored[2:5]), Branch(1, scored[:2], True), Branch(count - 1, scored[:1])],
        ),
        "strategies": draw_strategies(
            [Answered(n, of, plain if n == "greedy" else logged) for n, of in USUAL.items()]
        ),
        "speculation": draw_speculation(Steps(tuple(steps), lambda id: tokens[id % count])),
    }  # fmt: skip


def nat(probability: float) -> float:
    """A log-probability."""
    return math.log(probability)
