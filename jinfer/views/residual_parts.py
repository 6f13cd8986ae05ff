"""Residual parts: what each line of a layer's formula adds to the stream, and each head to that."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.modelspec.blocks import Block, LayerNormSpec, RMSNormSpec
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.progress import track
from jinfer.sampling.request_errors import RequestError
from jinfer.views.lm_head import FrozenHead, frozen_head
from jinfer.views.logit_attribution import Attribution, draw_attribution, token_label
from jinfer.views.token_likelihoods import token_names
from jinfer.views.traced_values import captured, layer_count
from jinfer.views.view import View

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_CLOSE = 0.02  # share of a part that may be missing: activations are rounded before products

_ROUNDING = 1e-3  # of a logit, not worth a column


@dataclass(frozen=True)
class _Line:
    """A line of a layer's formula that gives a new stream.

    Attributes:
        value: name of the stream behind it: "x@1", "x".
        modules: those whose outputs it adds, norms looked into.
        outer: an RMS norm that is applied to the output of its only module; "": none.
    """

    value: str
    modules: tuple[str, ...]
    outer: str = ""


def attribution(
    llm: LLM,
    prompt: Prompt,
    *,
    answer: str | int | None = None,
    against: str | int | None = None,
    position: int = -1,
) -> View:
    """Direct logit attribution of an answer's logit, or of its difference from another's.

    Args:
        answer: a token's id, or a text, of which the first token counts (" Paris"); None: the
            likeliest token.
        against: the token whose logit is subtracted; None: none.
        position: of the prompt's token that the answer follows; -1: the last one.

    Raises:
        RequestError: the model's head is not a norm and a projection, or there is no such token
            or position.
    """
    return draw_attribution(attribute(llm, prompt, answer, against, position))


def attribute(
    llm: LLM,
    prompt: Prompt,
    answer: str | int | None,
    against: str | int | None,
    position: int,
) -> Attribution:
    """The parts of a logit; arguments as `attribution`."""
    ids, layers = llm.encode(prompt), layer_count(llm)
    if type(position) is not int or not -len(ids) <= position < len(ids):
        raise RequestError(
            f"position is {position!r}, and the prompt has {len(ids)} tokens; give one from 0, or "
            "from its end: -1 is the last"
        )
    at = position % len(ids)
    assert llm.spec.decoder is not None
    lines = [_lines(llm, layer) for layer in llm.spec.decoder.layers]
    known = {one.name for one in llm.names()}
    names = ["embed", "logits"]
    for number, each in enumerate(lines):
        for line in each:
            wanted = [line.value, *line.modules, *(f"{m}.heads" for m in line.modules)]
            names += [n for w in wanted if (n := f"decoder.{number}.{w}") in known]
    values = captured(llm, ids[: at + 1], list(dict.fromkeys(names)))
    here = {name: np.asarray(value[at], np.float32) for name, value in values.items()}
    final, logits = here[f"decoder.{layers - 1}.x"], here["logits"]
    token = _token(llm, answer, int(np.argmax(logits)))
    head = frozen_head(llm, final, token)
    said, logit = f"{head.stage} of {_label(llm, token)}", float(logits[token])
    if against is not None:
        other = _token(llm, against, token)
        less = frozen_head(llm, final, other)
        direction, constant = head.direction - less.direction, head.constant - less.constant
        head = FrozenHead(direction, constant, head.stage)
        said += f" minus that of {_label(llm, other)}"
        logit -= float(logits[other])
    said += f" after position {at} {_label(llm, ids[at])}"
    stream, parts = here["embed"], list[dict[str, float]]()
    heads = list[np.ndarray]()
    for number in track(range(layers), "attributing", unit="layer"):
        found, own = dict[str, float](), np.zeros(0, np.float32)
        for line in lines[number]:
            after = here.get(f"decoder.{number}.{line.value}")
            if after is None:  # no stream of its own: the next one has both
                continue
            added, stream = after - stream, after
            for part, value in _split(line, here, number, added, head.direction):
                found[part] = found.get(part, 0.0) + value
            one = _heads(llm, line, here, number, added, head.direction)
            own = own if one is None else np.concatenate([own, one])
        parts.append(found)
        heads.append(own)
    columns = list(dict.fromkeys(part for one in parts for part in one))
    table = np.array([[one.get(name, np.nan) for name in columns] for one in parts], np.float32)
    most = max(map(len, heads))
    padded = [np.pad(one, (0, most - len(one)), constant_values=np.nan) for one in heads]
    explained = logit if head.stage == "logit" else float(final @ head.direction) + head.constant
    embed = float(here["embed"] @ head.direction)
    return Attribution(said, embed, columns, table, np.stack(padded), head.constant, explained)


def _lines(llm: LLM, layer: LayerSpec) -> list[_Line]:
    """The lines of a layer that give a new stream."""
    blocks = {**dict(llm.spec.shared), **dict(layer.modules)}
    statements = layer.wiring.statements
    last = len(statements) - 1
    streams = [at for at, (name, _) in enumerate(statements) if name == "x" or at == last]
    assigned, found = dict[str, ast.expr](), list[_Line]()
    for at, (target, value) in enumerate(statements):
        if at not in streams:
            assigned[target] = value
            continue
        modules = tuple(dict.fromkeys(_outermost(value, blocks, assigned)))
        name = "x" if at == last else f"x@{len(found) + 1}"
        found.append(_Line(name, modules, _outer(value, blocks, modules)))
    return found


def _outermost(
    value: ast.AST, blocks: Mapping[str, Block], assigned: Mapping[str, ast.expr]
) -> Iterator[str]:
    """The modules whose outputs a value is made of; norms are looked into."""
    match value:
        case ast.Call(func=ast.Name(id=name)) if name in blocks and not _is_norm(blocks[name]):
            yield name
            return
        case ast.Name(id=name) if name in assigned:
            others = {other: of for other, of in assigned.items() if other != name}
            yield from _outermost(assigned[name], blocks, others)
    for part in ast.iter_child_nodes(value):
        yield from _outermost(part, blocks, assigned)


def _is_norm(block: Block) -> bool:
    return isinstance(block, RMSNormSpec | LayerNormSpec)


def _outer(value: ast.expr, blocks: Mapping[str, Block], modules: Sequence[str]) -> str:
    for node in ast.walk(value):
        match node:
            case ast.Call(func=ast.Name(id=norm), args=[ast.Call(func=ast.Name(id=inner))]):
                if isinstance(blocks.get(norm), RMSNormSpec) and [inner] == list(modules):
                    return norm
    return ""


def _factors(
    line: _Line,
    here: Mapping[str, np.ndarray],
    number: int,
    added: Float[np.ndarray, " hidden"],
) -> Sequence[Float[np.ndarray, ...]] | None:
    """What each module's output is multiplied with before a line adds them; None: they do not add.

    A number each, as multipliers of residuals are, found by least squares; or for each dimension
    where an RMS norm, whose scale is held fixed, is between.
    """
    outputs = [here.get(f"decoder.{number}.{name}") for name in line.modules]
    known = [out for out in outputs if out is not None and out.shape == added.shape]
    if not outputs or len(known) < len(outputs):
        return None
    if line.outer:
        (out,) = known
        return [np.where(out == 0, 0, added / np.where(out == 0, 1, out)).astype(np.float32)]
    matrix = np.stack(known, axis=1).astype(np.float64)
    factors, *_ = np.linalg.lstsq(matrix, added.astype(np.float64), rcond=None)
    close = np.linalg.norm(added - matrix @ factors) <= _CLOSE * np.linalg.norm(added)
    return [np.asarray(factor, np.float32) for factor in factors] if close else None


def _split(
    line: _Line,
    here: Mapping[str, np.ndarray],
    number: int,
    added: Float[np.ndarray, " hidden"],
    direction: Float[np.ndarray, " hidden"],
) -> Iterator[tuple[str, float]]:
    """What a line's modules add to the logit; the names of all of them where they do not add up."""
    whole, factors = float(added @ direction), _factors(line, here, number, added)
    if len(line.modules) < 2 or factors is None:
        yield " + ".join(line.modules) or "rest", whole
        return
    for name, factor in zip(line.modules, factors, strict=True):
        part = float((factor * here[f"decoder.{number}.{name}"]) @ direction)
        whole -= part
        yield name, part
    if abs(whole) > _ROUNDING:
        yield "rounding", whole


def _heads(
    llm: LLM,
    line: _Line,
    here: Mapping[str, np.ndarray],
    number: int,
    added: Float[np.ndarray, " hidden"],
    direction: Float[np.ndarray, " hidden"],
) -> Float[np.ndarray, " heads"] | None:
    """What each head of the line's attention adds; None where heads do not add up."""
    factors = _factors(line, here, number, added)
    for name, factor in zip(line.modules, factors or (), strict=factors is not None):
        prefix = f"decoder.{number}.{name}"
        heads, weight = here.get(f"{prefix}.heads"), f"{prefix}.o.weight"
        if heads is None or weight not in llm.weights:
            continue
        matrix = np.asarray(llm.weights[weight].values, np.float32)
        if matrix.shape == (len(added), heads.size):
            onto = (factor * direction) @ matrix
            return np.asarray((heads.reshape(-1) * onto).reshape(len(heads), -1).sum(axis=1))
    return None


def _token(llm: LLM, given: str | int | None, default: int) -> int:
    """A token's id."""
    if given is None:
        return default
    if isinstance(given, str):
        ids = llm.session.tokenizer.encode(given, special=False)
        if not ids:
            raise RequestError("the answer is empty; give a text such as ' Paris', or a token's id")
        return ids[0]
    return llm.encode([given])[0]


def _label(llm: LLM, token: int) -> str:
    return token_label(token_names(llm, [token])[0])
