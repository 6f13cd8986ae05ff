"""Draft sources: the table of what `[speculation] draft` can name.

A new draft source is a module with a `Drafter`, its test, and a line of `DRAFT_SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jinfer.loader.open_model import Opened
from jinfer.modelspec.speculation_table import DraftSpec
from jinfer.speculate.drafter import DraftContext, Drafter
from jinfer.speculate.layer_skipping import layer_skipping
from jinfer.speculate.model_drafters import model_drafter
from jinfer.speculate.open_draft_model import ModelSource, open_draft_model, open_own_head
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.suffix_tree import SuffixDrafter


@dataclass(frozen=True)
class DraftSource:
    """A kind of draft.

    Attributes:
        make: makes the drafter.
        open: opens the model that it drafts with; None if it needs no other model.
        options: keys that an entry of this source may have.
    """

    make: Callable[[DraftContext], Drafter]
    open: Callable[[Opened, DraftSpec, ModelSource], Opened] | None = None
    options: tuple[str, ...] = ()

    def check(self, entry: DraftSpec) -> tuple[str, str] | None:
        """The first option that an entry must not have: its key and the reason."""
        if entry.weights is not None and "weights" not in self.options:
            return "source", f'"{entry.source}" has no weights and no layers'
        if entry.device is not None and "device" not in self.options:
            return "device", "is of a model with weights of its own; leave it out"
        return None


_MODEL = ("weights", "device")

DRAFT_SOURCES: Mapping[str, DraftSource] = {
    "ngram": DraftSource(lambda _: PromptLookup(branches=2)),
    "suffix": DraftSource(lambda _: SuffixDrafter()),
    "head": DraftSource(model_drafter, open_own_head, _MODEL),
}
# Entries that name a model instead, or give `weights` or `skip` of the target itself.
OTHER_MODEL = DraftSource(model_drafter, open_draft_model, _MODEL)
SKIPPED_LAYERS = DraftSource(layer_skipping, options=("skip",))


def draft_source(entry: DraftSpec) -> DraftSource:
    """The source of an entry of `[speculation] draft`."""
    unnamed = SKIPPED_LAYERS if entry.skip else OTHER_MODEL
    return DRAFT_SOURCES.get(entry.source or "", unnamed)
