"""Branch of a layer as a draft has it: its formula, its modules and where their tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.spec_facts import DraftFacts, Value

ACTIVATIONS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    *("afn", "ffn_config.ffn_act_fn.name", "dense_act_fn", "hidden_activation_function"),
)
_WORDS = (
    *("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "gelu_new"),
    *("gelu_fast", "gelu_python", "gelu_pytorch_tanh", "relu_squared", "swish"),
)
_BIDING = {"swiglu": "silu", "geglu": "gelu", "gated-gelu": "gelu_tanh", "reglu": "relu"}


@dataclass
class Branch:
    """What stands between a norm and the sum, of the layer's input `n`.

    Attributes:
        word: what it is, as part of a variant's name.
        value: its formula.
        lines: those before it.
        modules: name -> its table.
        tensors: jinfer's name in the layer -> the file's name in the layer, or a table.
        used: modules of the file that it has found a place for.
    """

    word: str
    value: str = ""
    lines: list[str] = field(default_factory=list)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, name: str, part: Part, **table: Any) -> None:
        """Gives a module of the file its place; with `axis`, `groups`, `transpose` as a table."""
        on = {key: value for key, value in table.items() if value}
        self.tensors[name] = {"from": part.name, **on} if on else part.name
        self.used.add(part.inner)

    def linear(self, name: str, part: Part, outputs: Value, **keys: Any) -> None:
        """A projection as a module of its own."""
        self.modules[name] = linear(outputs, part.bias, **keys)
        self.take(name, part)


def linear(outputs: Value, bias: bool = False, **keys: Any) -> dict[str, Any]:
    """The table of a projection."""
    return {"kind": "linear", **keys, "outputs": outputs} | ({"bias": True} if bias else {})


def activation(facts: DraftFacts, default: str = "silu") -> dict[str, Any]:
    """The key `activation` of a feed-forward; {} where nothing says it."""
    key = facts.key(*ACTIVATIONS)
    if not key:
        return {}
    word = str(facts.get(key)).lower()
    if word in _WORDS:
        return {"activation": f"${key}"}
    if word in _BIDING:
        facts.asked.add(key)
        return {"activation": _BIDING[word]}
    facts.note(f"activation: {key} = {word!r} is no word of jinfer's")
    return {"activation": default}


def turned(part: Part, inputs: int, whole: bool) -> bool:
    """Whether a matrix is stored [inputs, outputs].

    Args:
        whole: what holds where both sizes are equal.
    """
    rows, columns = part.shape[-2:] if len(part.shape) > 1 else (0, 0)
    return whole if rows == columns else rows == inputs and columns != inputs


def sized(facts: DraftFacts, value: int, by: str, *keys: str) -> Value:
    """A size as one of [dims] times what one of these keys says, else as a number."""
    share = value // facts.known[by] if value % facts.known[by] == 0 else 0
    found = facts.size(share, *keys)
    return f"{by} * {found}" if isinstance(found, str) else facts.size(value, *keys)


def norm(part: Part, eps: Value = "eps", layered: bool = False, **keys: Any) -> dict[str, Any]:
    """The table of a norm, by whether it has a bias.

    Args:
        layered: a key says that it is a layer norm; without a bias, it has none.
    """
    own = {} if part.bias or not layered else {"bias": False}
    return {"kind": "layer" if part.bias or layered else "rms", **keys, **own, "eps": eps}


def act(branch: Branch, function: Value = "silu", name: str = "act") -> None:
    """Adds an activation function."""
    branch.modules[name] = {"kind": "activation", "function": function}


def set_sizes(facts: DraftFacts, sizes: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
    """Makes sizes of [dims]: name -> value, and the keys that may say it."""
    for name, (value, keys) in sizes.items():
        facts.known.setdefault(name, value)
        facts.dims.setdefault(name, facts.size(value, *keys))
