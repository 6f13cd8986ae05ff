"""Branch of a layer in a proposed spec: its formula, its modules and the names of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.cli.propose.spec_facts import SpecFacts, Value

ACTIVATIONS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    *("afn", "ffn_config.ffn_act_fn.name", "dense_act_fn"),
)
_WORDS = (
    *("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "gelu_new"),
    *("gelu_fast", "gelu_python", "gelu_pytorch_tanh", "relu_squared", "swish"),
)
_GATED = {"swiglu": "silu", "geglu": "gelu", "gated-gelu": "gelu_tanh", "reglu": "relu"}


@dataclass
class Branch:
    """The part of a layer between a norm and the sum, a function of the norm's output {n}.

    Attributes:
        word: its part of a variant's name.
        value: its formula.
        lines: formulas before it.
        modules: name -> its table.
        tensors: parameter in the layer -> tensor in the layer, or a table of it.
        used: names of the modules of the file that have a place.
    """

    word: str
    value: str = ""
    lines: list[str] = field(default_factory=list)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, name: str, part: Part, leaf: str = "", **keys: Any) -> None:
        """Give a module of the file its place; with `axis`, `groups`, `transpose` as a table.

        Args:
            leaf: "weight" or "bias": only that tensor.
        """
        source = f"{part.name}.{leaf}" if leaf else part.name
        given = {key: value for key, value in keys.items() if value}
        self.tensors[name] = {"from": source, **given} if given else source
        self.used.add(part.name)


def linear(outputs: Value, bias: bool = False, **keys: Any) -> dict[str, Any]:
    """Return the table of a projection."""
    return {"kind": "linear", **keys, "outputs": outputs} | ({"bias": True} if bias else {})


def norm(part: Part, **keys: Any) -> dict[str, Any]:
    """Return the table of a norm: a layer norm if it has a bias."""
    return {"kind": "layer" if part.bias else "rms", **keys, "eps": "eps"}


def activation(facts: SpecFacts) -> dict[str, Any]:
    """Return the key `activation` of a feed-forward; {} if config.json has none."""
    key = facts.key(*ACTIVATIONS)
    word = str(facts.get(key)).lower() if key else ""
    if word in _WORDS:
        return {"activation": f"${key}"}
    if word in _GATED:
        facts.asked.add(key)
        return {"activation": _GATED[word]}
    if key:
        facts.note(f"activation: {key} = {word!r} is unknown; silu is a guess")
    return {}
