"""Views: pictures of activations, weights and answers, for notebooks and files.

Each takes an `LLM` and, except for `memory`, a prompt, and returns a `View`: a notebook shows it,
`save` writes it to a file, `to_pandas` has its numbers. The modules' `draw_...` functions take
arrays.
"""

from jinfer.views.activation_outliers import outliers
from jinfer.views.alternatives_tree import alternatives
from jinfer.views.attention_maps import attention_patterns
from jinfer.views.cell_grid import grid
from jinfer.views.draft_trees import speculation
from jinfer.views.logit_attribution import attribution
from jinfer.views.logit_lens import logit_lens
from jinfer.views.memory_use import memory
from jinfer.views.router_load import router_loads
from jinfer.views.strategy_table import strategies
from jinfer.views.token_likelihoods import tokens
from jinfer.views.view import View
from jinfer.views.weight_errors import quantization_error

__all__ = [
    "View",
    "alternatives",
    "attention_patterns",
    "attribution",
    "grid",
    "logit_lens",
    "memory",
    "outliers",
    "quantization_error",
    "router_loads",
    "speculation",
    "strategies",
    "tokens",
]
