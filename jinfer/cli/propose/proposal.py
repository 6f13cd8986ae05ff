"""Parts of a proposed spec: facts of config.json with the sizes found so far, and branches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import Part
from jinfer.loader.model_files import ModelFiles
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.spec_values import MissingKey

type Value = str | int | float | bool | dict[str, Any] | None

# Names of [dims] -> keys of config.json, and of GGUF files without the architecture's prefix.
KEYS = {
    name: tuple(keys.split())
    for name, keys in {
        "vocab": "vocab_size padded_vocab_size",
        "hidden": "hidden_size n_embd n_embed d_model dim model_dim embedding_length",
        "layers": "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
        " num_decoder_layers",
        "heads": "num_attention_heads n_head n_heads num_heads attention.head_count"
        " encoder_attention_heads decoder_attention_heads",
        "kv_heads": "num_key_value_heads num_kv_heads n_head_kv n_kv_heads kv_n_heads"
        " multi_query_group_num num_query_groups attention.head_count_kv",
        "head_dim": "head_dim d_kv kv_channels attention_head_dim attention.key_length",
        "intermediate": "intermediate_size n_inner ffn_dim d_ff hidden_dim encoder_ffn_dim"
        " decoder_ffn_dim ffn_hidden_size dense_intermediate_size feed_forward_length"
        " intermediate_size_mlp block_ff_dim shared_intermediate_size",
        "context": "max_position_embeddings n_positions max_seq_len seq_length n_ctx"
        " context_length model_max_length",
        "eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps layernorm_epsilon"
        " norm_epsilon block_norm_eps",
        "experts": "num_experts num_local_experts n_routed_experts moe_num_experts expert_count"
        " ffn_config.moe_num_experts",
        "top_k": "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k"
        " expert_used_count ffn_config.moe_top_k",
        "expert_intermediate": "moe_intermediate_size expert_ffn_hidden_size"
        " ffn_config.ffn_hidden_size expert_feed_forward_length intermediate_size ffn_dim",
    }.items()
}


@dataclass
class SpecFacts:
    """Facts that a proposed spec follows from, and those found while it is made.

    Attributes:
        read: keys of config.json that were read without a reference in the text.
        dims: sizes in the order in which they were found: name -> value or expression.
        known: their values.
        notes: guesses, a line each.
        positions: positions are added to the embedding.
        encoded: there is an encoder before the decoder.
        weightless: the table of norms, where the file has none.
        shared: role -> module of layer 0 that all layers share.
    """

    opened: ModelFiles
    read: set[str] = field(default_factory=set)
    dims: dict[str, Value] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    positions: bool = False
    encoded: bool = False
    weightless: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.opened.config
        self.gguf = self.opened.checkpoint.format == "gguf"
        self._tables: tuple[str, ...] = ("",)
        if self.gguf:
            arch = f"{config.get('general.architecture', '')}."
            self._config = {key.removeprefix(arch): value for key, value in config.items()}
            return
        text = config.get("text_config")
        # Where each stack has a table of its own, the decoder's counts.
        own = (name for name in ("decoder", "encoder") if isinstance(config.get(name), Mapping))
        self._tables = ("", *(f"{name}." for name in own))
        self._config = {**config, **text} if isinstance(text, Mapping) else dict(config)
        self._lookup = lookup_in(self._config)

    def _get(self, key: str) -> Any:
        if self.gguf:
            return self._config.get(key)
        try:
            value = self._lookup(key)
        except MissingKey:
            return None
        return dict(value) if isinstance(value, Mapping) else value

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that has one; None if none has."""
        key = self.key(*keys)
        return self._get(key) if key else None

    def key(self, *keys: str) -> str:
        """Return the first of these keys that has a value; "" if none has."""
        names = (f"{table}{key}" for table in self._tables for key in keys)
        return next((name for name in names if self._get(name) is not None), "")

    def size(self, value: float, *keys: str) -> Value:
        """Return `$key` where one of these keys has this value, else the value."""
        names = (f"{table}{key}" for table in self._tables for key in keys)
        found = next((name for name in names if _same(self._get(name), value)), "")
        return f"${found}" if found else value

    def set_size(self, name: str, value: int, *keys: str) -> None:
        """Make a size one of [dims], unless it is there."""
        self.known.setdefault(name, value)
        self.dims.setdefault(name, self.size(value, *keys))

    def note(self, text: str) -> None:
        """Add a line about a guess."""
        if text not in self.notes:
            self.notes.append(text)

    def dim(self, name: str, value: int, default: str = "") -> dict[str, Value]:
        """Make a size one of [dims], unless it is there.

        Args:
            default: an expression of other sizes with the same value, for where no key has it.

        Returns:
            The module's own key, where the size of [dims] is another one.
        """
        keys = KEYS.get(name, ())
        own = self.size(value, *keys)
        if name in self.known:
            return {} if self.known[name] == value else {name: own}
        self.known[name] = value
        null = next((k for k in keys if not self.gguf and self._config.get(k, "") is None), "")
        if isinstance(own, str):
            own = f"{own} | {default}" if default else own
        elif default or null:
            own = default or value
            own = f"${null} | {own}" if null else own
        self.dims[name] = own
        return {}

    def multiple(self, value: int, of: str) -> str:
        """Return a size as an expression of another one, where it is a multiple; else ""."""
        other = self.known.get(of, 0)
        if not other or value % other:
            return ""
        return of if value == other else f"{value // other} * {of}"


def _same(found: Any, value: float) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and found == value


def read_keys(text: str) -> set[str]:
    """Return the keys of config.json that a text refers to, without what follows a dot."""
    return {key.partition(".")[0] for key in re.findall(r"\$([\w.]+)", text)}


ACTIVATIONS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    *("afn", "ffn_config.ffn_act_fn.name", "dense_act_fn"),
)
_WORDS = (
    *("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "gelu_new"),
    "softplus",
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
        facts.read.add(key)
        return {"activation": _GATED[word]}
    if key:
        facts.note(f"activation: {key} = {word!r} is unknown; silu is a guess")
    return {}
