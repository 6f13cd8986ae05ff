"""Drafts of what stands before and behind the layers: embeddings, last norm, heads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinfer.cli.propose.checkpoint_layers import CheckpointLayers, Part
from jinfer.cli.propose.layer_branch import ACTIVATIONS, linear, norm
from jinfer.cli.propose.spec_facts import KEYS, DraftFacts
from jinfer.cli.propose.tensor_roles import role_outside

_TABLES = {"position": "positions", "token_type": "token_types"}
_MASKED = re.compile(
    r"final_logits_bias|predictions|lm_head|vocab_|(^|\.)head\.|pred_layer|^decoder$|^decoder\.|generator"
)


@dataclass
class DraftedOutside:
    """What stands outside of layers.

    Attributes:
        modules: of the whole model.
        of_stack: stack -> its own modules.
        tensors: jinfer's name -> the file's.
        copies, ignored: as in `[tensors]`; ignored names are quoted.
        unplaced: modules without a place.
        scales: "embed" and "logits" -> what they are multiplied by.
    """

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_stack: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unplaced: list[Part] = field(default_factory=list)
    scales: dict[str, str] = field(default_factory=dict)
    last: str = "decoder"

    def own_modules(self, stack: str) -> dict[str, dict[str, Any]]:
        """The modules of a stack's stem and head."""
        return self.of_stack.get(stack, {})

    def stem(self, stack: str) -> str:
        """The formula of a stack's stem."""
        has = self.own_modules(stack)
        text = "embed(tokens)" + self.scales.get("embed", "")
        if "project_in" in has and not set(_TABLES) & set(has):
            text = f"project_in({text})"
        text = " + ".join([text, *(f"{name}({of})" for name, of in _TABLES.items() if name in has)])
        if "project_in" in has and set(_TABLES) & set(has):
            text = text.replace("embed(tokens)", "project_in(embed(tokens))", 1)
        return f"embed_norm({text})" if "embed_norm" in has else text

    def head(self, stack: str) -> str:
        """The formula of a stack's head."""
        has = self.own_modules(stack)
        text = "norm(x)" if "norm" in has else "x"
        text = f"project_out({text})" if "project_out" in has else text
        lines = []
        if "pooler" in has:
            lines += [
                "hidden = x" if text == "x" else f"hidden = {text}",
                "pooled = tanh(pooler(first(x)))",
            ]
        if stack != self.last or "logits" not in self.modules:
            return "\n".join(lines) if lines else text
        inner = f"mlm({text})" if "mlm" in has else text
        inner = f"mlm_act({inner})" if "mlm_act" in has else inner
        inner = f"mlm_norm({inner})" if "mlm_norm" in has else inner
        if "mlm" in has and not lines:
            lines.append("hidden = " + text)
        value = f"logits({inner}){self.scales.get('logits', '')}"
        if cap := self.scales.get("cap"):
            return "\n".join([*lines, f"capped = {value}", f"{cap} * tanh(capped / {cap})"])
        return "\n".join([*lines, value])


def draft_outside(layers: CheckpointLayers, facts: DraftFacts) -> DraftedOutside:
    """Drafts the modules outside of layers, and finds the sizes that they tell."""
    outside = DraftedOutside()
    names = [stack.name for stack in layers.stacks]
    outside.last = names[-1] if names else "decoder"
    roles = {name: role_outside(name) for name in layers.outside}
    embed = _embed(layers, roles, facts)
    head = next((p for name, p in layers.outside.items() if roles[name] == "logits"), None)
    _sizes(layers, embed, head, facts)
    hidden, vocab = facts.known["hidden"], facts.known.get("vocab", 0)
    outside.modules["embed"] = {"kind": "embedding"}
    if embed and embed.shape[0] != vocab:
        outside.modules["embed"]["size"] = embed.shape[0]
        facts.note(f"{embed.name}: more rows than the head gives tokens")
    width = embed.shape[-1] if embed else hidden
    if width != hidden:
        outside.modules["embed"]["width"] = width
    if embed:
        outside.tensors["embed"] = embed.name
    copies = []
    for name, part in layers.outside.items():
        role = roles[name]
        if "relative_attention_bias" in name or "rope_freqs" in name:
            where = _stack_of(name, names, outside.last)
            facts.shared["rope_freqs" if "rope" in name else f"{where}.relative"] = part
            continue
        if "seq_relationship" in name or name.endswith("rope_factors_long"):
            outside.ignored += [f'"{name}.*"' if "seq" in name else f'"{name}.weight"']
            continue
        stack = _stack_of(name, names, outside.last)
        own = outside.of_stack.setdefault(stack, {})
        if part is embed:
            continue
        if role == "embed" and embed and part.shape == embed.shape:
            copies += [f"{name}.weight" if "weight" in part.leaves else name]
        elif role == "logits" and part.shape[0] == vocab and len(part.shape) == 2:
            outside.tensors["logits"] = name
            outside.modules["logits"] = {"kind": "head"} | ({"bias": True} if part.bias else {})
        elif _place(outside, own, stack, name, role, part, facts):
            continue
        else:
            outside.unplaced.append(part)
    if copies:
        outside.copies["embed.weight"] = copies
    _masked(outside, facts)
    _head_by_shape(outside, facts, width)
    _tie(outside, facts, width)
    _scales(outside, facts)
    return outside


def _stack_of(name: str, stacks: Iterable[str], last: str) -> str:
    """The stack that a module's name says, or else the last one."""
    return next((stack for stack in stacks if re.search(rf"(^|[._]){stack}\.", name)), last)


def _embed(layers: CheckpointLayers, roles: Mapping[str, str], facts: DraftFacts) -> Part | None:
    found = [layers.outside[name] for name, role in roles.items() if role == "embed"]
    found.sort(key=lambda part: part.last not in ("shared", "embed_tokens", "wte"))
    tables = [part for part in found if len(part.shape) == 2]
    told = facts.get(*KEYS["vocab"])
    exact = [part for part in tables if part.shape[0] == told]
    if not tables and isinstance(told, int):  # none that is called so: the first of its shape
        sizes = (told, facts.get(*KEYS["hidden"]))
        unnamed = [part for part in layers.outside.values() if part.shape == sizes]
        exact = [part for part in unnamed if roles[part.name] != "logits"]
    return next(iter(exact or tables), None)


def _sizes(
    layers: CheckpointLayers, embed: Part | None, head: Part | None, facts: DraftFacts
) -> None:
    """vocab, hidden, layers, context and eps."""
    told = facts.get(*KEYS["vocab"])
    if embed and head and head.shape[0] == told < embed.shape[0]:
        facts.dim("vocab", told)  # embeddings of further inputs stand behind those of tokens
    elif embed or isinstance(told, int):
        facts.dim("vocab", embed.shape[0] if embed else told)
    if not embed:
        facts.note("no table of token embeddings is known by its name")
    votes: Counter[int] = Counter()
    for stack in layers.stacks:
        for kind in stack.kinds:
            votes.update(
                p.vector
                for p in kind.parts.values()
                if "norm" in p.inner.lower() or "ln" in p.inner.lower()
            )
            votes.update(p.shape[-1] for p in kind.parts.values() if len(p.shape) == 2)
    votes.pop(0, None)
    width = embed.shape[-1] if embed else 0
    told = facts.get(*KEYS["hidden"], "embedding_length")
    hidden = (
        told
        if isinstance(told, int) and told in votes
        else width
        if width in votes
        else votes.most_common(1)[0][0]
        if votes
        else width
    )
    facts.dim("hidden", hidden)
    count = max((stack.count for stack in layers.stacks), default=0)
    facts.dim("layers", count)
    key = facts.key(*KEYS["context"])
    context = facts.get(key) if key else None
    if isinstance(context, int):
        facts.dims["context"] = f"${key} | 2048"
    else:
        facts.dims["context"] = 2048
    if facts.gguf:
        return
    eps = facts.key(*KEYS["eps"])
    facts.dims["eps"] = f"${eps} | 1e-5" if eps else 1e-5
    if not eps:
        facts.note("eps: no key says what norms add; 1e-5 is a guess")


def _place(
    outside: DraftedOutside,
    own: dict[str, dict[str, Any]],
    stack: str,
    name: str,
    role: str,
    part: Part,
    facts: DraftFacts,
) -> bool:
    """Gives a module its place in a stack; False if there is none."""
    hidden = facts.known["hidden"]
    width = outside.modules["embed"].get("width", hidden)
    if role == "norm" and "norm" not in own and part.vector in (hidden, width):
        own["norm"] = norm(part, layered=facts.layered) | (
            {"size": part.vector} if part.vector != hidden else {}
        )
    elif role == "embed_norm" and part.vector in (hidden, width):
        own["embed_norm"] = norm(part, layered=facts.layered) | (
            {"size": part.vector} if part.vector != hidden else {}
        )
    elif role == "position" and len(part.shape) == 2:
        own["position"] = {"kind": "learned_positions"}
        facts.positions = True
        context = facts.get(*KEYS["context"])
        offset = part.shape[0] - context if isinstance(context, int) else 0
        if 0 < offset <= 8:
            own["position"]["offset"] = offset
            facts.note(f"{name}: {offset} rows more than positions, read as an offset")
        elif offset:
            own["position"]["size"] = part.shape[0]
        if part.shape[-1] != hidden:
            own["position"]["width"] = part.shape[-1]
    elif role == "token_type" and len(part.shape) == 2:
        own["token_type"] = {
            "kind": "embedding",
            "size": facts.size(part.shape[0], "type_vocab_size"),
        }
        if part.shape[-1] != hidden:
            own["token_type"]["width"] = part.shape[-1]
    elif role in ("project_in", "project_out") and len(part.shape) == 2:
        inside, out = part.shape[1], part.shape[0]
        own[role] = linear(out, part.bias, inputs=inside)
    elif "pooler" in name and part.shape == (hidden, hidden) and stack == "encoder":
        own["pooler"] = linear("hidden", part.bias)
        own["first"] = {"kind": "pool", "take": "first"}
        own["tanh"] = {"kind": "activation", "function": "tanh"}
        outside.tensors[f"{stack}.pooler"] = name
        return True
    else:
        return False
    outside.tensors[f"{stack}.{role}"] = name
    return True


def _masked(outside: DraftedOutside, facts: DraftFacts) -> None:
    """The head of a masked language model: a projection, an activation, a norm, a bias."""
    vocab, stack = facts.known.get("vocab", 0), outside.last
    width = outside.modules["embed"].get("width", facts.known["hidden"])
    own = outside.of_stack.setdefault(stack, {})
    found: dict[str, Part] = {}
    order = sorted(outside.unplaced, key=lambda part: (part.shape[0] == vocab, part.vector > 0))
    for part in order:
        if not _MASKED.search(part.name):
            continue
        if (
            len(part.shape) == 2
            and part.shape[1] == facts.known["hidden"]
            and part.shape[0] != vocab
        ):
            if "mlm" not in found:
                found["mlm"], width = part, part.shape[0]
        elif part.vector == width and "norm" in part.name.lower():
            found["mlm_norm"] = part
        elif part.vector == vocab:
            found.setdefault("bias", part)
        elif part.shape == (vocab, width):
            found["logits"] = part
    if not found:
        return
    taken = list(found.values())
    outside.unplaced = [part for part in outside.unplaced if part not in taken]
    if "mlm" in found:
        own["mlm"] = linear(width, found["mlm"].bias)
        key = facts.key(*ACTIVATIONS)
        own["mlm_act"] = {"kind": "activation", "function": f"${key}" if key else "gelu"}
        outside.tensors[f"{stack}.mlm"] = found["mlm"].name
    if "mlm_norm" in found:
        own["mlm_norm"] = norm(found["mlm_norm"]) | {"size": width}
        outside.tensors[f"{stack}.mlm_norm"] = found["mlm_norm"].name
    head = outside.modules.setdefault("logits", {"kind": "head"})
    if "logits" in found:
        outside.tensors["logits"] = found["logits"].name
        head |= {"bias": True} if found["logits"].bias else {}
    if "bias" in found and "logits" in found and found["logits"].bias:
        outside.ignored.append(f'"{_whole(found["bias"])}"')
        facts.note(f"{_whole(found['bias'])} is taken for a copy of the head's own bias")
    elif "bias" in found:
        head["bias"] = True
        outside.tensors["logits.bias"] = _whole(found["bias"])


def _head_by_shape(outside: DraftedOutside, facts: DraftFacts, width: int) -> None:
    """A head whose name says nothing: the only matrix left that gives the vocabulary."""
    shape = (facts.known.get("vocab", 0), width)
    found = [part for part in outside.unplaced if part.shape == shape]
    if "logits" in outside.tensors or len(found) != 1:
        return
    (part,) = found
    outside.unplaced.remove(part)
    outside.tensors["logits"] = part.name
    outside.modules["logits"] = {"kind": "head"} | ({"bias": True} if part.bias else {})
    facts.note(f"{part.name}: read as the head by its shape")


def _whole(part: Part) -> str:
    return part.name + "".join(f".{leaf}" for leaf in part.leaves if leaf)


def _tie(outside: DraftedOutside, facts: DraftFacts, width: int) -> None:
    """The vocabulary head where it has no matrix of its own."""
    own = outside.of_stack.setdefault(outside.last, {})
    head = outside.modules.get("logits")
    if head is None and outside.last == "encoder" and "mlm" not in own:
        return
    head = outside.modules.setdefault("logits", {"kind": "head"})
    inputs = own["mlm"]["outputs"] if "mlm" in own else width
    if "logits" not in outside.tensors:
        head["tied"] = True
    elif inputs != width or "size" in outside.modules["embed"]:
        pass
    elif facts.get("tie_word_embeddings") is True:
        head["tied"] = True
    width = own["mlm"]["outputs"] if "mlm" in own else width if "project_out" in own else 0
    if width not in (0, facts.known["hidden"]):
        head["inputs"] = width


def _scales(outside: DraftedOutside, facts: DraftFacts) -> None:
    """What embeddings and logits are multiplied by, as keys say."""
    if key := facts.key("embedding_multiplier", "scale_emb", "embedding_scale"):
        facts.dims["embedding_scale"] = f"${key} | 1"
        outside.scales["embed"] = " * embedding_scale"
    elif facts.get("scale_embedding") is True:
        facts.dims["embedding_scale"] = "sqrt(hidden) if $scale_embedding else 1"
        outside.scales["embed"] = " * embedding_scale"
    if "logits" not in outside.modules:
        return
    if key := facts.key("logit_scale", "lm_head_multiplier", "output_multiplier"):
        facts.dims["logits_scale"] = f"${key} | 1"
        outside.scales["logits"] = " * logits_scale"
    elif key := facts.key("logits_scaling"):
        facts.dims["logits_scale"] = f"${key} | 1"
        outside.scales["logits"] = " / logits_scale"
    elif facts.key("dim_model_base"):
        facts.dims["logits_scale"] = "hidden / $dim_model_base"
        outside.scales["logits"] = " / logits_scale"
    if key := facts.key("final_logit_softcapping", "logits_soft_cap", "final_logit_softcap"):
        facts.dims["logits_cap"] = f"${key}"
        outside.scales["cap"] = "logits_cap"
        outside.of_stack.setdefault(outside.last, {})["tanh"] = {
            "kind": "activation",
            "function": "tanh",
        }
