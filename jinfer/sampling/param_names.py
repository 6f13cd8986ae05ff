"""Names of strategies, samplers and parameters: jinfer's, and those of other engines' clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jinfer.sampling.request_errors import RequestError

Strategy = Literal[
    "auto",
    "greedy",
    "sample",
    "top_k",
    "top_p",
    "min_p",
    "typical",
    "tfs",
    "top_a",
    "top_n_sigma",
    "xtc",
    "mirostat",
    "fsd",
    "random_fsd",
    "contrastive",
    "beam",
]

# Every stage, in the order that holds where a request does not choose another. The rules (bias,
# bad words, min_tokens) are no taste and always come first. Penalties work on the model's own
# logits. The temperature comes before what cuts the distribution, as in vLLM and transformers, so
# that top_p is a share of what is drawn from; the filters follow one another as in llama.cpp. The
# last two decide by what all others left.
STAGES = (
    "rules",
    "penalties",
    "dry",
    "temperature",
    "dynatemp",
    "top_n_sigma",
    "top_k",
    "tfs_z",
    "typical_p",
    "top_p",
    "min_p",
    "top_a",
    "xtc",
    "mirostat",
    "fsd",
)
# What a request may put into an order of its own; "temperature" stands for either kind.
SAMPLERS = tuple(name for name in STAGES if name not in ("rules", "dynatemp", "mirostat", "fsd"))

# Names that llama.cpp gives them.
SAMPLER_NAMES: Mapping[str, str] = {
    "temp": "temperature",
    "temp_ext": "temperature",
    "dynatemp": "temperature",
    "typ_p": "typical_p",
    "typ": "typical_p",
    "typical": "typical_p",
    "nucleus": "top_p",
    "tfs": "tfs_z",
    "penalty": "penalties",
}


def own_sampler(name: str) -> str:
    """jinfer's name of a sampler; llama.cpp writes some with hyphens."""
    plain = name.replace("-", "_")
    return SAMPLER_NAMES.get(plain, plain)


# What a strategy sets where the request leaves it out. The numbers are Inferflow's where it has
# the strategy; top_a is KoboldAI's, top_n_sigma and xtc are their authors'.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical": {"typical_p": 0.95},
    "tfs": {"tfs_z": 0.95},
    "top_a": {"top_a": 0.2},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.5},
    "mirostat": {"mirostat": 2},
    "random_fsd": {"top_p": 0.93, "top_k": 8},
    "contrastive": {"top_k": 4},
}
_STANDARD = {"top_p": 0.9, "top_k": 8}  # Inferflow's sample.std cuts by both, whichever is first

# Other engines' names of strategies: jinfer's name, and what the name sets besides.
STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": ("sample", _STANDARD),
    "std": ("sample", _STANDARD),
    "sample.std": ("sample", _STANDARD),
    "sample.greedy": ("greedy", {}),
    "sample.top_k": ("top_k", {}),
    "sample.top_p": ("top_p", _STANDARD),
    "sample.fsd": ("fsd", {}),
    "sample.random_fsd": ("random_fsd", {}),
    "random": ("sample", {}),
    "typical_p": ("typical", {}),
    "tfs_z": ("tfs", {}),
    "mirostat_v2": ("mirostat", {}),
    "contrastive_search": ("contrastive", {}),
    "beam_search": ("beam", {}),
}

# What the authors of FSD chose (arXiv 2305.12675) where Inferflow has other numbers; 0.55 for
# Chinese.
PAPERS_FSD: Mapping[str, Any] = {"fsd_alpha": 0.65, "fsd_k": 3, "fsd_pool": 0}

# Other engines' names of parameters.
PARAMETERS: Mapping[str, str] = {
    # llama.cpp
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
    "typ_p": "typical_p",
    "typical": "typical_p",
    "tfs": "tfs_z",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "dynatemp_exp": "dynatemp_exponent",
    "n_probs": "logprobs",
    # vLLM and transformers
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_beams": "beams",
    "bad_words_token_ids": "bad_words_ids",
    "stop_strings": "stop",
    # Inferflow
    "decoding_alg": "strategy",
    "decoding_strategy": "strategy",
    "max_k": "top_k",
    "pool_size": "fsd_pool",
    "random_seed": "seed",
    "max_output_len": "max_tokens",
    "tau": "mirostat_tau",
    "eta": "mirostat_eta",
}


def own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """A request's parameters under jinfer's names; names that nobody knows stay as they are.

    Inferflow's `decoding_alg` may be an object, whose "name" is the strategy and whose other keys
    are its parameters.

    Raises:
        RequestError: one parameter is given by two names.
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        own = PARAMETERS.get(name, name)
        given = {own: value}
        if own == "strategy" and isinstance(value, Mapping):
            inner = own_names({key: v for key, v in value.items() if key != "name"})
            given = {"strategy": value.get("name", ""), **inner}
        for key, one in given.items():
            if key in named:
                raise RequestError(f"{name}: {key} is given twice; leave one out")
            named[key] = one
    return named
