"""Speculative decoding, specification: the table `[speculation]`, draft sources and tree sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jinfer.modelspec.bounded_types import Count, Size
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table

MOST_NODES = 64  # of a tree that is verified
_DEEPEST, _WIDEST = 8, 4  # levels of a draft model's tree, and tokens after one token


@dataclass(frozen=True)
class DraftSpec:
    """A draft source: an entry of `draft`; a string is its `source`.

    The options of a named source are in `jinfer.speculate.draft_sources`.

    Attributes:
        source: "ngram": prompt lookup, what followed the same tokens in the prompt or the answer;
            "suffix": what followed them in this answer or earlier ones; "head": the draft head in
            the model's checkpoint; else a model or a head, named as a model is; none: the model
            itself.
        weights: a narrower format of the draft model's weights, such as "q3".
        skip: layers of the model itself that its draft leaves out, from 0 on.
        device: number of the device that a draft model runs on; none: the model's, of several the
            first one of the last stage.
    """

    source: str | None = None
    weights: str | None = None
    skip: tuple[Count, ...] = ()
    device: Count | None = None

    def check(self) -> tuple[str, str] | None:
        """The first value that is wrong: its key and the reason."""
        if self.source is None and self.weights is None and not self.skip:
            return "source", "is missing; name a model, or give weights or skip of the own"
        if self.device is not None and self.skip:
            return "device", "is of a model with weights of its own; leave it out"
        if self.source is not None and self.skip:
            return "skip", "is about the model itself; leave out the source"
        if self.weights is not None and self.skip:
            return "skip", "shares the model's weights; leave out weights"
        return None


@dataclass(frozen=True)
class SpeculationSpec:
    """Speculative decoding: `[speculation]`.

    Attributes:
        draft: draft sources; tokens of earlier ones count as likelier.
        nodes: tokens of a sequence that a call verifies, the last known one included; "auto": as
            many as pay off, perhaps none.
        expansion: of a draft model: number of tokens after each one, level by level; none: a chain
            with one alternative to each of its tokens.
        head: family of the draft head in the model's checkpoint, if it has one.
    """

    draft: tuple[DraftSpec, ...] = ()
    nodes: Literal["auto"] | Size = "auto"
    expansion: tuple[Size, ...] = ()
    head: str | None = None

    def check(self) -> tuple[str, str] | None:
        """The first value that is wrong: its key and the reason."""
        if self.nodes != "auto" and not 2 <= self.nodes <= MOST_NODES:
            return "nodes", f'{self.nodes} is not from 2 to {MOST_NODES}, or "auto"'
        if len(self.expansion) > _DEEPEST:
            return "expansion", f"has {len(self.expansion)} levels; at most {_DEEPEST} are drafted"
        if wrong := [width for width in self.expansion if width > _WIDEST]:
            return "expansion", f"{wrong[0]} tokens cannot follow one; at most {_WIDEST} do"
        count, level = 1, 1
        for width in self.expansion:
            level *= width
            count += level
        if count > MOST_NODES:
            return "expansion", f"is a tree of {count} tokens; at most {MOST_NODES} are verified"
        return None


def read_speculation(written: Any, values: SpecValues) -> SpeculationSpec:
    """Reads the table. Raises `SpecError`."""
    table = dict(as_table(written, values.path, "speculation"))
    draft = table.pop("draft", [])
    listed = draft if isinstance(draft, list | tuple) else [draft]
    found = []
    for i, entry in enumerate(listed):
        key = "speculation.draft" if listed is not draft else f"speculation.draft[{i}]"
        if not isinstance(entry, str | Mapping) or entry == "":
            reason = f'{show_value(entry)} is not "ngram", "suffix", a model, or a table {{ ... }}'
            raise SpecError(values.path, key, reason)
        given = {"source": entry} if isinstance(entry, str) else entry
        found.append(_draft(given, values, key))
    rest = read_value(SpeculationSpec, table, values, "speculation")
    return SpeculationSpec(tuple(found), rest.nodes, rest.expansion, rest.head)


def _draft(given: Mapping[str, Any], values: SpecValues, key: str) -> DraftSpec:
    """Reads an entry. Its source is a name, and is not looked up in the checkpoint's config."""
    table = dict(given)
    source = table.pop("source", None)
    if source is not None and (not isinstance(source, str) or not source):
        raise SpecError(
            values.path, f"{key}.source", f"{show_value(source)} is not the name of a model"
        )
    read_ = read_value(_Own, table, values, key)
    spec = DraftSpec(source, read_.weights, read_.skip, read_.device)
    if wrong := spec.check():
        raise SpecError(values.path, f"{key}.{wrong[0]}", wrong[1])
    return spec


@dataclass(frozen=True)
class _Own:
    """The keys of an entry besides `source`."""

    weights: str | None = None
    skip: tuple[Count, ...] = ()
    device: Count | None = None
