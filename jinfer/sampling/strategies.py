"""Decoding strategies: names, other engines' names, and the parameters that each name sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
# Deterministic strategies.
DETERMINISTIC = ("greedy", "fsd", "contrastive", "beam")

# Defaults that a strategy sets. The numbers are Inferflow's where it has
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

# Other engines' names of strategies -> jinfer's name, and further defaults.
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
