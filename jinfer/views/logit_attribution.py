"""Direct logit attribution: what each layer, feed-forward and head adds to a token's logit.

The residual stream is a sum, and with the final norm's scale held fixed so is a logit (arXiv
2211.00593; "A Mathematical Framework for Transformer Circuits", 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import visible
from jinfer.modelspec.blocks import RMSNormSpec, ScaleSpec
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.progress import track
from jinfer.sampling.request_errors import RequestError
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.lm_head import FrozenHead, frozen_head
from jinfer.views.token_likelihoods import token_names
from jinfer.views.traced_values import captured, layer_count
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_TOKEN = 24  # columns of a token


@dataclass(frozen=True)
class Attribution:
    """A logit, or the difference of two, as a sum.

    Attributes:
        what: it is: "logit of ␣Paris", at which position.
        embed: of the stream before the first layer.
        parts: names of what layers add, such as "attn" and "ffn".
        values: what each adds; nan: the layer has no such part.
        heads: what each head adds to its attention's part; nan: heads do not add up there.
        constant: of biases of norm and head.
        logit: as the model gave it.
    """

    what: str
    embed: float
    parts: Sequence[str]
    values: Float[np.ndarray, "layers parts"]
    heads: Float[np.ndarray, "layers heads"]
    constant: float
    logit: float

    @property
    def layers(self) -> Float[np.ndarray, " layers"]:
        """What each layer adds."""
        return np.nansum(self.values, axis=1)

    @property
    def total(self) -> float:
        """The sum of all parts: the logit but for rounding."""
        return float(self.embed + self.layers.sum() + self.constant)


def draw_attribution(found: Attribution) -> View:
    """The view of an attribution: a row for each layer, a column for each head and part."""
    layers, heads = found.heads.shape
    everything = np.concatenate(
        [found.values.ravel(), found.heads.ravel(), found.layers, [found.embed, found.constant]]
    )
    largest = float(np.nanmax(np.abs(everything), initial=0)) or 1.0

    def cell(value: float, title: str) -> Cell | None:
        if np.isnan(value):
            return None
        return Cell(f"{value:+z.2f}", f"{title}: {value:+.4f}", value / largest)

    empty: list[Cell | None] = [None] * (heads + len(found.parts))
    rows: list[tuple[str, Sequence[Cell | None]]] = [
        ("embed", [*empty, cell(found.embed, "embedding")])
    ]
    for at in range(layers):
        cells = [cell(v, f"layer {at}, head {h}") for h, v in enumerate(found.heads[at])]
        named = zip(found.parts, found.values[at], strict=True)
        cells += [cell(value, f"layer {at}, {part}") for part, value in named]
        rows.append((str(at), [*cells, cell(found.layers[at], f"layer {at}")]))
    if found.constant:
        rows.append(("biases", [*empty, cell(found.constant, "biases of norm and head")]))
    total = Cell(f"{found.total:+.2f}", f"sum of all parts: {found.total:+.4f}", strong=True)
    rows.append(("sum", [*empty, total]))
    columns = [*(f"h{h}" for h in range(heads)), *found.parts, "layer"]
    about = f"{found.what} = {found.logit:+.3f}; parts add up to {found.total:+.3f}"
    grid = cell_grid("layer", columns, rows, wide=max(6, *map(len, columns)) + 1, number=True)
    return View("direct logit attribution", about, grid, lambda: _table(found))


def token_label(text: str) -> str:
    """A token as attributions name it."""
    return visible(text, _TOKEN)


def _table(found: Attribution) -> Table:
    rows: list[tuple[int | None, str, int | None, float]] = [(None, "embed", None, found.embed)]
    for at in range(len(found.values)):
        rows += [
            (at, part, None, float(value))
            for part, value in zip(found.parts, found.values[at], strict=True)
            if not np.isnan(value)
        ]
        rows += [
            (at, "head", head, float(value))
            for head, value in enumerate(found.heads[at])
            if not np.isnan(value)
        ]
    rows.append((None, "biases", None, found.constant))
    names = ("layer", "part", "head", "logit")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


_ROUNDING = 1e-3  # of a logit, not worth a column


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
    specs = llm.spec.decoder.layers
    known = {value.name for value in llm.names()}
    names = ["embed", "logits"]
    for number, layer in enumerate(specs):
        leaves = ["x"]
        for contribution in layer.wiring.contributions:
            leaves += [
                contribution.name,
                *contribution.modules,
                *(f"{module}.heads" for module in contribution.modules),
            ]
        names += [n for w in leaves if (n := f"decoder.{number}.{w}") in known]
    values = captured(llm, ids[: at + 1], list(dict.fromkeys(names)))
    here = {name: np.asarray(value[at], np.float32) for name, value in values.items()}
    final, logits = here[f"decoder.{layers - 1}.x"], here["logits"]
    token = _token(llm, answer, int(np.argmax(logits)))
    head = frozen_head(llm, final, token)
    title, logit = f"{head.stage} of {_label(llm, token)}", float(logits[token])
    if against is not None:
        other = _token(llm, against, token)
        less = frozen_head(llm, final, other)
        direction, constant = head.direction - less.direction, head.constant - less.constant
        head = FrozenHead(direction, constant, head.stage)
        title += f" minus that of {_label(llm, other)}"
        logit -= float(logits[other])
    title += f" after position {at} {_label(llm, ids[at])}"
    stream, parts = here["embed"], list[dict[str, float]]()
    heads = list[np.ndarray]()
    for number in track(range(layers), "attributing", unit="layer"):
        prefix = f"decoder.{number}."
        own = {n.removeprefix(prefix): v for n, v in here.items() if n.startswith(prefix)}
        before, stream = stream, own["x"]
        parts.append(_parts(specs[number], own, stream - before, head.direction))
        heads.append(_heads(llm, number, own, head.direction))
    columns = list(dict.fromkeys(part for row in parts for part in row))
    table = np.array([[row.get(name, np.nan) for name in columns] for row in parts], np.float32)
    max_heads = max(map(len, heads))
    padded = [
        np.pad(values, (0, max_heads - len(values)), constant_values=np.nan) for values in heads
    ]
    explained = logit if head.stage == "logit" else float(final @ head.direction) + head.constant
    embed = float(here["embed"] @ head.direction)
    return Attribution(title, embed, columns, table, np.stack(padded), head.constant, explained)


def _parts(
    layer: LayerSpec,
    here: Mapping[str, np.ndarray],
    change: Float[np.ndarray, " hidden"],
    direction: Float[np.ndarray, " hidden"],
) -> dict[str, float]:
    """What a layer's contributions add to the logit, and what else changes the stream."""
    found = dict[str, float]()
    rest = float(change @ direction)
    for contribution in layer.wiring.contributions:
        added = here[contribution.name]
        if added.shape == direction.shape:
            part, name = float(added @ direction), " + ".join(contribution.modules)
            found[name] = found.get(name, 0.0) + part
            rest -= part
    if abs(rest) > _ROUNDING:
        found["rest"] = rest
    return found


def _heads(
    llm: LLM, number: int, here: Mapping[str, np.ndarray], direction: Float[np.ndarray, " hidden"]
) -> Float[np.ndarray, " heads"]:
    """What each head of the layer's attentions adds to the logit, where heads add up."""
    assert llm.spec.decoder is not None
    layer = llm.spec.decoder.layers[number]
    blocks, found = {**dict(llm.spec.shared), **dict(layer.modules)}, list[np.ndarray]()
    for contribution in layer.wiring.contributions:
        module, *others = contribution.modules
        heads, weight = here.get(f"{module}.heads"), f"decoder.{number}.{module}.o.weight"
        linear = all(
            isinstance(blocks[name], RMSNormSpec | ScaleSpec) for name in contribution.through
        )
        if heads is None or others or not linear or weight not in llm.weights:
            continue
        matrix = np.asarray(llm.weights[weight].values, np.float32)
        out, added = here[module], here[contribution.name]
        if matrix.shape == (len(out), heads.size) and out.shape == added.shape == direction.shape:
            # What is between, a number or a norm whose scale is held fixed, is a factor.
            factor = np.where(out == 0, 0, added / np.where(out == 0, 1, out))
            onto = (factor * direction) @ matrix
            found.append((heads.reshape(-1) * onto).reshape(len(heads), -1).sum(axis=1))
    return np.concatenate([np.zeros(0, np.float32), *found])


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
