"""Draft models, opening: another model, the target at fewer bits, or a head, with checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.loader.open_model import Opened, open_model
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.tokenizer import Tokenizer

KEY = "speculation.draft"

# The target's source and overrides, of which a draft may be a narrower copy.
type ModelSource = tuple[str | Path, Mapping[str, Any]]


def open_draft_model(opened: Opened, entry: DraftSpec, target: ModelSource) -> Opened:
    """Opens the model that an entry names, or the target with narrower weights.

    Raises:
        SpecError: a model that does not fit the target.
        SourceError, CheckpointError, TokenizerError: one that cannot be opened.
    """
    if entry.source is None:
        return _open_target_again(target, _changes(entry))
    draft = open_model(_resolved(entry.source, opened.spec), _changes(entry), alone=False)
    if draft.spec.follows is None:
        _check_tokens(opened, draft, entry.source)
    elif draft.spec.dims["vocab"] != opened.spec.dims["vocab"]:
        vocabs = draft.spec.dims["vocab"], opened.spec.dims["vocab"]
        reason = f"{entry.source} is for {vocabs[0]} tokens, and the model has {vocabs[1]}"
        raise SpecError(opened.spec.path, KEY, f"{reason}; take a head that was made for it")
    if not draft.spec.partition.is_plain:
        reason = (
            "a draft model runs on one device; leave it out, and set device in the entry of draft"
        )
        raise SpecError(draft.spec.path, "partition", reason)
    return draft


def open_own_head(opened: Opened, entry: DraftSpec, target: ModelSource) -> Opened:
    """Opens the head that the target's checkpoint has. Raises `SpecError` if it has none."""
    if opened.spec.speculation.head is None:
        reason = "the model's family knows of no head in its checkpoints; name a draft"
        raise SpecError(opened.spec.path, KEY, reason)
    return _open_target_again(target, _changes(entry) | {"family": opened.spec.speculation.head})


def _changes(entry: DraftSpec) -> dict[str, Any]:
    """Overrides that an entry's narrower weights ask for."""
    if entry.weights is None:
        return {}
    # Fast to quantize; a draft that is a little worse changes no token.
    return {"quantization.weights": entry.weights, "quantization.method": "mse"}


def _open_target_again(target: ModelSource, changes: Mapping[str, Any]) -> Opened:
    source, overrides = target
    dropped = ("speculation", "partition")
    common = {k: v for k, v in overrides.items() if k.partition(".")[0] not in dropped}
    return open_model(source, {**common, "speculation.draft": [], **changes}, alone=False)


def _resolved(source: str, spec: ModelSpec) -> str | Path:
    """A source in a specification file may be relative to that file."""
    near = Path(spec.path).parent / source
    return near if spec.path.endswith(".toml") and near.exists() else source


def _check_tokens(opened: Opened, draft: Opened, source: str) -> None:
    """Raises `SpecError` if a draft model's tokens are not the target's."""
    path = opened.spec.path
    if draft.spec.decoder is None or draft.spec.type != opened.spec.type:
        reason = f"{source} is {draft.spec.type}, and the model is {opened.spec.type}"
        raise SpecError(path, KEY, reason)
    if not draft.spec.generates:
        raise SpecError(path, KEY, f"{source} has no vocabulary head, and so drafts no tokens")
    if opened.spec.type != "decoder-only":
        raise SpecError(
            path, KEY, 'an encoder-decoder can only be drafted for by "ngram", "suffix"'
        )
    sizes = [one.spec.dims["vocab"] for one in (opened, draft)]
    if (opened.tokenizer is None) != (draft.tokenizer is None):
        whose = source if draft.tokenizer is None else "the model"
        raise SpecError(path, KEY, f"{whose} has no tokenizer, so nobody knows if {source} fits")
    if opened.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            reason = f"{source} has {sizes[1]} tokens, and the model {sizes[0]}; take another draft"
            raise SpecError(path, KEY, reason)
        return
    if (id := _first_difference(opened.tokenizer, draft.tokenizer, min(sizes))) is not None:
        mine, other = (t.token(id) for t in (opened.tokenizer, draft.tokenizer))
        raise SpecError(
            path,
            KEY,
            f"the tokenizer of {source} is another one: token {id} is {show_value(other)} "
            f"there and {show_value(mine)} here; take a draft of the same family",
        )


def _first_difference(one: Tokenizer, other: Tokenizer, count: int) -> int | None:
    """The first token id that two tokenizers spell differently."""
    return next((id for id in range(count) if one.token(id) != other.token(id)), None)
