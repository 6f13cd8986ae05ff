"""Activations of a request: checks what it captures and edits against the model's names."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from jinfer.api.build_engine import first_shapes
from jinfer.engine.activation_use import ActivationUse, place_edits
from jinfer.engine.engine import Engine
from jinfer.engine.requests import Request, RequestError
from jinfer.engine.runner.edit_tables import taps_of
from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.nn.activation_taps import TapError
from jinfer.sampling.activation_edits import Edit, Range, Steer
from jinfer.sampling.sampling_params import ACTIVATIONS, SamplingParams

if TYPE_CHECKING:
    from jinfer.nn.activation_shapes import ActivationShape

MAX_BYTES = 4 << 30  # of the activations that an answer captures


def request_activations(
    engine: Engine, sampling: SamplingParams, prompt: int, limit: int
) -> ActivationUse | None:
    """What a request captures and edits; None: nothing.

    Args:
        prompt, limit: tokens of the prompt, and of prompt and answer together at most.

    Raises:
        RequestError: a name or a shape that the model has not, or what cannot be combined.
    """
    named_fields = [name for name in ACTIVATIONS if getattr(sampling, name)]
    if not named_fields:
        return None
    _check_combined(engine, sampling, named_fields[0])
    known = engine.runner.model.activations
    capture = _captured(sampling.capture, known)
    sizes = {name: prod(_of_token("capture", name, known)) for name in capture}
    total = 4 * sum(sizes.values()) * (limit - 1)
    if total > MAX_BYTES:
        raise RequestError(
            f"capture: {len(capture)} values of {limit - 1} tokens take {total / 2**30:.1f} GiB, "
            f"and an answer may have {MAX_BYTES >> 30}; capture fewer, or set max_tokens"
        )
    edits = all_edits(sampling)
    edited = place_edits(edits, edited_shapes(edits, known), prompt)
    return ActivationUse.of(capture, edited, 4 * sum(sizes.values()))


def all_edits(sampling: SamplingParams) -> list[Edit]:
    """The edits of a request in their order, steering vectors last."""
    edits, steer = sampling.edits, sampling.steer
    assert not isinstance(edits, Edit), "it was read as a tuple"
    assert not isinstance(steer, Steer), "it was read as a tuple"
    return [*edits, *(item.edit for item in steer)]


def edited_shapes(
    edits: Iterable[Edit], known: Mapping[str, ActivationShape]
) -> dict[str, tuple[int, ...]]:
    """The shape of one token's value at each place. Raises `RequestError` for other names."""

    shapes = dict[str, tuple[int, ...]]()
    for edit in edits:
        if edit.name not in known and "*" in edit.name:
            raise RequestError(
                f"{edit.field}: {show_value(edit.name)} is a pattern, and an edit has one place; "
                "give one for each name"
            )
        if edit.name not in known:
            # Imported here, because it imports Flax, and few requests need it.
            from jinfer.api.activation_names import nearest

            raise RequestError(
                f"{edit.field}: the model has no value {show_value(edit.name)}"
                f"{nearest(edit.name, known)}"
            )
        shapes[edit.name] = _of_token(edit.field, edit.name, known)
    return shapes


def compile_for(engine: Engine, request: Request) -> None:
    """Compiles what a request with activations needs, so that no request in the engine waits.

    Raises:
        RequestError: an edited value does not take part in the forward pass.
    """
    taps = taps_of([request.activations])
    if taps is None:
        return
    try:
        for program in engine.runner.programs.announce(
            first_shapes(engine, len(request.prompt), taps)
        ):
            program.result()
    except TapError as error:  # it has the name within the layer
        part, _, why = str(error).partition(" ")
        named = [place.name for place in taps.places if f".{place.name}".endswith(f".{part}")]
        raise RequestError(f"edits: {' or '.join(named) or part} {why}") from error


def check_steering(engine: Engine, vectors: Sequence[Steer]) -> None:
    """Raises `RequestError` if steering vectors do not fit the model."""
    edits = [vector.edit for vector in vectors]
    place_edits(edits, edited_shapes(edits, engine.runner.model.activations), 1)


def _captured(patterns: object, known: Mapping[str, ActivationShape]) -> list[str]:
    """The names that patterns choose; of a pattern those that have a value for each token."""
    from jinfer.api.activation_names import matching  # imports the modules of models

    found = set[str]()
    for pattern in patterns if isinstance(patterns, Iterable) else ():
        try:
            names = matching(pattern, known)
        except RequestError as error:
            raise RequestError(f"capture: {error}") from None
        found |= {n for n in names if n == pattern or _is_by_token(n, known)} or {*names}
    return [name for name in known if name in found]


def _is_by_token(name: str, known: Mapping[str, ActivationShape]) -> bool:
    return known[name].of_token is not None and not name.startswith("encoder.")


def _of_token(field: str, name: str, known: Mapping[str, ActivationShape]) -> tuple[int, ...]:
    shape = known[name].of_token
    if name.startswith("encoder."):
        raise RequestError(
            f"{field}: {name} is computed once for all requests with the same text; llm.trace "
            "captures it"
        )
    if shape is None:
        axes = ", ".join(known[name].axes)
        raise RequestError(
            f"{field}: {name} has axes ({axes}), not a vector for each token; use llm.trace"
        )
    return shape


def _check_combined(engine: Engine, sampling: SamplingParams, field: str) -> None:
    """Raises `RequestError` for what activations cannot be combined with."""
    if engine.runner.programs.pipeline is not None:
        raise RequestError(
            f"{field}: the model is divided among devices or processes; open it without [partition]"
        )
    if sampling.strategy == "contrastive":
        raise RequestError(
            f'{field}: strategy="contrastive" compares candidates that are not edited; use another'
        )
    if sampling.strategy == "beam" and sampling.capture:
        raise RequestError(
            'capture: strategy="beam" computes several answers at a time; generate, then trace it'
        )


MAX_NAMES = 1024


@dataclass
class SteeringVectors:
    """Named steering vectors, in the host's memory.

    Attributes:
        max_bytes: bytes that they may have together.
        kept: name -> the vectors, one for each activation.
    """

    max_bytes: int = 1 << 30
    kept: dict[str, tuple[Steer, ...]] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, name: object, vectors: Sequence[Steer]) -> None:
        """Keeps vectors under a name, in place of those it had.

        Raises:
            RequestError: the name is no short text, or there is no room.
        """
        if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable():
            raise RequestError(f"a steering vector's name is {show_value(name)}; give a short text")
        if not vectors:
            raise RequestError(f"steering {name!r} has no vectors; give one")
        with self._changing:
            others = {n: v for n, v in self.kept.items() if n != name}
            size = sum(item.vector.nbytes for v in (*others.values(), vectors) for item in v)
            if size > self.max_bytes or len(others) >= MAX_NAMES:
                raise RequestError(
                    f"there is no room for {name!r}: steering vectors may take {self.max_bytes} "
                    f"bytes and {MAX_NAMES} names; forget others"
                )
            self.kept = others | {name: tuple(vectors)}

    def forget(self, name: object) -> None:
        """Forgets vectors; requests that use them go on. Raises `RequestError`."""
        with self._changing:
            self.find(name)
            self.kept = {n: v for n, v in self.kept.items() if n != name}

    def find(
        self, name: object, scale: float = 1.0, tokens: Range | slice = "all"
    ) -> tuple[Steer, ...]:
        """The vectors of a name, `scale` times. Raises `RequestError` if there are none."""
        found: Any = self.kept.get(name) if isinstance(name, str) else None
        if found is None:
            known = nearest_hint(str(name), self.kept) if self.kept else "none is kept"
            raise RequestError(f"there is no steering vector {show_value(name)}; {known}")
        return tuple(replace(item, scale=item.scale * scale, tokens=tokens) for item in found)
