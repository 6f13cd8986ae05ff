"""Modules outside of layers in a proposed spec: embeddings, last norm, heads; their formulas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import CheckpointLayers, Part
from jinfer.cli.propose.proposal import ACTIVATIONS, KEYS, SpecFacts, linear, norm
from jinfer.cli.propose.tensor_roles import role_outside

_TABLES = {"position": "positions", "token_type": "token_types"}
_MASKED = re.compile(
    r"final_logits_bias|predictions|lm_head|vocab_|(^|\.)head\.|pred_layer|^decoder$|^decoder\."
    r"|generator"
)


@dataclass
class ProposedOutside:
    """The modules outside of layers.

    Attributes:
        modules: of the whole model.
        of_stack: stack -> its own modules.
        tensors: jinfer's name -> the file's.
        copies, ignored: as in `[tensors]`; ignored names are quoted.
        unplaced: modules without a place.
        scales: factors of "embed" and "logits", and the "cap" of logits.
        last: the stack with the head.
    """

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_stack: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unplaced: list[Part] = field(default_factory=list)
    scales: dict[str, str] = field(default_factory=dict)
    last: str = "decoder"

    def stem(self, stack: str) -> str:
        """Return the formula of a stack's stem."""
        has = self.of_stack.get(stack, {})
        text = "embed(tokens)" + self.scales.get("embed", "")
        text = f"project_in({text})" if "project_in" in has else text
        text = " + ".join([text, *(f"{name}({of})" for name, of in _TABLES.items() if name in has)])
        return f"embed_norm({text})" if "embed_norm" in has else text

    def head(self, stack: str) -> str:
        """Return the formula of a stack's head."""
        has = self.of_stack.get(stack, {})
        text = "norm(x)" if "norm" in has else "x"
        text = f"project_out({text})" if "project_out" in has else text
        lines = [f"hidden = {text}"] if {"pooler", "mlm"} & has.keys() else []
        if "pooler" in has:
            lines.append("pooled = tanh(pooler(first(x)))")
        if stack != self.last or "logits" not in self.modules:
            return "\n".join(lines) or text
        for name in ("mlm", "mlm_act", "mlm_norm"):
            text = f"{name}({text})" if name in has else text
        value = f"logits({text}){self.scales.get('logits', '')}"
        if cap := self.scales.get("cap"):
            lines.append(f"capped = {value}")
            value = f"{cap} * tanh(capped / {cap})"
        return "\n".join([*lines, value])


def propose_outside(layers: CheckpointLayers, facts: SpecFacts) -> ProposedOutside:
    """Propose the modules outside of layers, and find the sizes that they tell."""
    outside = ProposedOutside()
    stacks = [stack.name for stack in layers.stacks]
    outside.last = stacks[-1] if stacks else "decoder"
    roles = {name: role_outside(name) for name in layers.outside}
    embed = _embed(layers, roles, facts)
    _sizes(layers, embed, facts)
    hidden, vocab = facts.known["hidden"], facts.known.get("vocab", 0)
    width = embed.shape[-1] if embed else hidden
    outside.modules["embed"] = {"kind": "embedding"} | ({"width": width} if width != hidden else {})
    if embed:
        outside.tensors["embed"] = embed.name
    for name, part in layers.outside.items():
        role, stack = roles[name], _stack_of(name, stacks, outside.last)
        own = outside.of_stack.setdefault(stack, {})
        if "relative_attention_bias" in name or "rope_freqs" in name:
            facts.shared["rope_freqs" if "rope" in name else f"{stack}.relative"] = part
        elif "seq_relationship" in name or name.endswith("rope_factors_long"):
            outside.ignored.append(f'"{name}.*"' if "seq" in name else f'"{name}.weight"')
        elif role == "embed" and embed and part.shape == embed.shape:
            if part is not embed:
                outside.copies.append(_whole(part))
        elif role == "logits" and part.shape[0] == vocab and len(part.shape) == 2:
            _set_head(outside, part)
        elif not _place(outside, own, stack, role, part, facts):
            outside.unplaced.append(part)
    _masked_head(outside, facts, width)
    _tie(outside, facts, width)
    _scales(outside, facts)
    return outside


def _stack_of(name: str, stacks: Iterable[str], last: str) -> str:
    """The stack of a module by its name, or else the last one."""
    return next((stack for stack in stacks if re.search(rf"(^|[._]){stack}\.", name)), last)


def _embed(layers: CheckpointLayers, roles: Mapping[str, str], facts: SpecFacts) -> Part | None:
    found = [layers.outside[name] for name, role in roles.items() if role == "embed"]
    found.sort(key=lambda part: part.last not in ("shared", "embed_tokens", "wte"))
    tables = [part for part in found if len(part.shape) == 2]
    exact = [part for part in tables if part.shape[0] == facts.get(*KEYS["vocab"])]
    return next(iter(exact or tables), None)


def _sizes(layers: CheckpointLayers, embed: Part | None, facts: SpecFacts) -> None:
    """Find vocab, hidden, layers, context and eps."""
    if embed:
        facts.dim("vocab", embed.shape[0])
    else:
        facts.note("no table of token embeddings is known by its name")
    votes: Counter[int] = Counter()
    for part in (part for s in layers.stacks for kind in s.kinds for part in kind.values()):
        votes[part.vector if "norm" in part.inner or "ln" in part.inner else part.shape[-1]] += 1
    hidden = facts.get(*KEYS["hidden"])
    if not isinstance(hidden, int) or hidden not in votes:
        hidden = embed.shape[-1] if embed else max(votes, key=lambda size: votes[size], default=0)
    facts.dim("hidden", hidden)
    facts.dim("layers", max((len(stack.kind_of) for stack in layers.stacks), default=0))
    key = facts.key(*KEYS["context"])
    facts.dims["context"] = f"${key} | 2048" if key else 2048
    if not facts.gguf:
        eps = facts.key(*KEYS["eps"])
        facts.dims["eps"] = f"${eps} | 1e-5" if eps else 1e-5
        if not eps:
            facts.note("eps: no key says what norms add; 1e-5 is a guess")


def _place(
    outside: ProposedOutside,
    own: dict[str, dict[str, Any]],
    stack: str,
    role: str,
    part: Part,
    facts: SpecFacts,
) -> bool:
    """Give a module its place in a stack; return False if there is none."""
    hidden = facts.known["hidden"]
    width = outside.modules["embed"].get("width", hidden)
    sized = {"width": part.shape[-1]} if part.shape[-1] != hidden else {}
    if role in ("norm", "embed_norm") and role not in own and part.vector in (hidden, width):
        own[role] = norm(part) | ({"size": part.vector} if part.vector != hidden else {})
    elif role == "position" and len(part.shape) == 2:
        own[role] = {"kind": "learned_positions"} | sized
        facts.positions = True
        context = facts.get(*KEYS["context"])
        if isinstance(context, int) and 0 < part.shape[0] - context <= 8:
            own[role]["offset"] = part.shape[0] - context
            facts.note(f"{part.name}: its rows beyond the positions are read as an offset")
    elif role == "token_type" and len(part.shape) == 2:
        size = facts.size(part.shape[0], "type_vocab_size")
        own[role] = {"kind": "embedding", "size": size} | sized
    elif role in ("project_in", "project_out") and len(part.shape) == 2:
        own[role] = linear(part.shape[0], part.bias, inputs=part.shape[1])
    elif "pooler" in part.name and part.shape == (hidden, hidden) and stack == "encoder":
        role = "pooler"
        own[role] = linear("hidden", part.bias)
        own["first"] = {"kind": "pool", "take": "first"}
        own["tanh"] = {"kind": "activation", "function": "tanh"}
    else:
        return False
    outside.tensors[f"{stack}.{role}"] = part.name
    return True


def _set_head(outside: ProposedOutside, part: Part) -> None:
    head = outside.modules.setdefault("logits", {"kind": "head"})
    outside.tensors["logits"] = part.name
    if part.bias:
        head["bias"] = True


def _masked_head(outside: ProposedOutside, facts: SpecFacts, width: int) -> None:
    """The head of a masked language model: a projection, an activation, a norm, a bias."""
    vocab, stack = facts.known.get("vocab", 0), outside.last
    own = outside.of_stack.setdefault(stack, {})
    found: dict[str, Part] = {}
    parts = [part for part in outside.unplaced if _MASKED.search(part.name)]
    for part in sorted(parts, key=lambda part: (part.shape[0] == vocab, part.vector > 0)):
        if part.vector == vocab:
            found.setdefault("bias", part)
        elif part.vector == width and "norm" in part.name.lower():
            found["mlm_norm"] = part
        elif part.shape == (vocab, width):
            found["logits"] = part
        elif len(part.shape) == 2 and part.shape[1] == facts.known["hidden"] != vocab:
            found["mlm"], width = part, part.shape[0]
    outside.unplaced = [part for part in outside.unplaced if part not in found.values()]
    if mlm := found.get("mlm"):
        own["mlm"] = linear(width, mlm.bias)
        key = facts.key(*ACTIVATIONS)
        own["mlm_act"] = {"kind": "activation", "function": f"${key}" if key else "gelu"}
        outside.tensors[f"{stack}.mlm"] = mlm.name
    if mlm_norm := found.get("mlm_norm"):
        own["mlm_norm"] = norm(mlm_norm) | {"size": width}
        outside.tensors[f"{stack}.mlm_norm"] = mlm_norm.name
    if logits := found.get("logits"):
        _set_head(outside, logits)
    if bias := found.get("bias"):
        if logits and logits.bias:
            outside.ignored.append(f'"{_whole(bias)}"')
            facts.note(f"{_whole(bias)} is taken for a copy of the head's own bias")
        else:
            outside.modules.setdefault("logits", {"kind": "head"})["bias"] = True
            outside.tensors["logits.bias"] = _whole(bias)


def _whole(part: Part) -> str:
    return part.name + "".join(f".{leaf}" for leaf in part.leaves if leaf)


def _tie(outside: ProposedOutside, facts: SpecFacts, width: int) -> None:
    """Tie the vocabulary head to the embedding, where it has no matrix of its own."""
    own = outside.of_stack.setdefault(outside.last, {})
    if "logits" not in outside.modules and outside.last == "encoder" and "mlm" not in own:
        return
    head = outside.modules.setdefault("logits", {"kind": "head"})
    if "logits" not in outside.tensors:
        head["tied"] = True
    width = own["mlm"]["outputs"] if "mlm" in own else width if "project_out" in own else 0
    if width not in (0, facts.known["hidden"]):
        head["inputs"] = width


def _scales(outside: ProposedOutside, facts: SpecFacts) -> None:
    """Factors of embeddings and logits, by config keys."""
    if key := facts.key("embedding_multiplier", "scale_emb", "embedding_scale"):
        facts.dims["embedding_scale"] = f"${key} | 1"
        outside.scales["embed"] = " * embedding_scale"
    elif facts.get("scale_embedding") is True:
        facts.dims["embedding_scale"] = "sqrt(hidden) if $scale_embedding else 1"
        outside.scales["embed"] = " * embedding_scale"
    if "logits" not in outside.modules:
        return
    if key := facts.key("logit_scale", "lm_head_multiplier"):
        facts.dims["logits_scale"] = f"${key} | 1"
        outside.scales["logits"] = " * logits_scale"
    elif key := facts.key("logits_scaling", "dim_model_base"):
        divisor = f"${key} | 1" if key == "logits_scaling" else f"hidden / ${key}"
        facts.dims["logits_scale"] = divisor
        outside.scales["logits"] = " / logits_scale"
    if key := facts.key("final_logit_softcapping", "logits_soft_cap"):
        facts.dims["logits_cap"] = f"${key}"
        outside.scales["cap"] = "logits_cap"
        tanh = {"kind": "activation", "function": "tanh"}
        outside.of_stack.setdefault(outside.last, {})["tanh"] = tanh
