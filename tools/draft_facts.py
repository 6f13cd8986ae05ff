"""Facts for a draft: what config.json says, sizes by the key that says them, and what is open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.loader.model_files import ModelFiles
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.spec_values import MissingKey

type Value = str | int | float | bool | dict[str, Any] | None

# jinfer's word -> the words that config files have for it.
KEYS = {
    "vocab": ("vocab_size", "padded_vocab_size"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim"),
    "layers": (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("encoder_layers", "decoder_layers", "num_decoder_layers"),
    ),
    "heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention.head_count"),
        *("encoder_attention_heads", "decoder_attention_heads", "attention_heads"),
    ),
    "kv_heads": (
        *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads"),
        *("multi_query_group_num", "num_query_groups", "attention.head_count_kv"),
    ),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention.key_length"),
    "intermediate": (
        *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim"),
        *("decoder_ffn_dim", "ffn_hidden_size", "dense_intermediate_size", "feed_forward_length"),
        *("intermediate_size_mlp", "inner_size", "block_ff_dim", "shared_intermediate_size"),
    ),
    "context": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
        *(
            "max_seq_length",
            "context_length",
            "model_max_length",
            "max_sequence_length",
            "max_length",
        ),
    ),
    "eps": (
        *("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "layernorm_epsilon"),
        *("norm_epsilon", "rms_norm_epsilon", "block_norm_eps", "layer_norm_rms_epsilon"),
    ),
    "experts": (
        *(
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "expert_count",
        ),
        *("num_moe_experts", "ffn_config.moe_num_experts"),
    ),
    "top_k": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
        *("num_selected_experts", "top_k", "experts_per_token", "num_experts_per_topk", "topk"),
        *("expert_used_count", "ffn_config.moe_top_k"),
    ),
    "expert_intermediate": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size"),
        *("expert_feed_forward_length", "intermediate_size", "moe_ffn_hidden_size"),
        *("moe_ffn_dim", "expert_dim", "ffn_dim"),
    ),
}


@dataclass
class DraftFacts:
    """What a draft is made of, and what its making finds out.

    Attributes:
        asked: keys of config.json that the draft reads.
        dims: sizes in the order found: name -> value or expression.
        known: their values.
        notes: what is not known, a line each.
        positions: positions are added to the embedding.
        encoded: there is an encoder beside the decoder.
        weightless: the table of norms, where the file has none.
        shared: role -> module of layer 0 that all layers have.
    """

    opened: ModelFiles
    asked: set[str] = field(default_factory=set)
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
            flat = {key.removeprefix(arch): value for key, value in config.items()}
            self._get = lambda key: flat.get(key)
            return
        text = config.get("text_config")
        # Where each stack has a table of its own, the decoder's counts.
        own = (name for name in ("decoder", "encoder") if isinstance(config.get(name), Mapping))
        self._tables = ("", *(f"{name}." for name in own))
        lookup = lookup_in({**config, **text} if isinstance(text, Mapping) else config)

        def get(key: str) -> Any:
            try:
                value = lookup(key)
            except MissingKey:
                return None
            return dict(value) if isinstance(value, Mapping) else value

        self._get = get
        self._nulls = {key for key, value in config.items() if value is None}

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that has one; None if none has."""
        key = self.key(*keys)
        return self._get(key) if key else None

    def key(self, *keys: str) -> str:
        """The first of these keys that has a value; "" if none has."""
        names = (f"{table}{key}" for table in self._tables for key in keys)
        return next((name for name in names if self._get(name) is not None), "")

    @property
    def layered(self) -> bool:
        """Whether a key says that norms are layer norms, with a bias or without."""
        return bool(re.fullmatch(r"(\w+_)?layer_?norm", str(self.get("norm_type")).lower()))

    def size(self, value: float, *keys: str) -> Value:
        """A size as `$key` where one of these keys says the same, else as a number."""
        names = (f"{table}{key}" for table in self._tables for key in keys)
        found = next((name for name in names if _same(self._get(name), value)), "")
        return f"${found}" if found else value

    def note(self, text: str) -> None:
        """Adds a line about what is not known."""
        if text not in self.notes:
            self.notes.append(text)

    def dim(self, name: str, value: int, default: str = "") -> dict[str, Value]:
        """Makes a size one of [dims], unless it is there already.

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
        null = next((key for key in keys if not self.gguf and key in self._nulls), "")
        if isinstance(own, str):
            own = f"{own} | {default}" if default else own
        elif default or null:
            own = default or value
            own = f"${null} | {own}" if null else own
        self.dims[name] = own
        return {}

    def divided(self, value: int, by: str) -> str:
        """A size as a multiple of another one, where it is one; "" otherwise."""
        other = self.known.get(by, 0)
        if not other or value % other:
            return ""
        return by if value == other else f"{value // other} * {by}"


def _same(found: Any, value: float) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and found == value


def read_keys(text: str) -> set[str]:
    """The keys of config.json that a draft's text looks up, without what follows a dot."""
    return {key.partition(".")[0] for key in re.findall(r"\$([\w.]+)", text)}
