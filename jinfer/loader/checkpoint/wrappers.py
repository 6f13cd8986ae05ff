"""Wrapper prefixes of training, `module.`, `_orig_mod.` and their like: names without them.

DistributedDataParallel and DataParallel name all tensors `module.`, torch.compile names those of
what it compiled `_orig_mod.`, FSDP and activation checkpointing theirs, wherever in the model that
is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint

_ANYWHERE = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_IN_FRONT = "module."


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names that its model had before it was wrapped.

    Unchanged where two tensors would have one name.
    """
    names = {name: _ANYWHERE.sub("", name) for name in checkpoint.tensors}
    while names and all(name.startswith(_IN_FRONT) for name in names.values()):
        names = {old: new.removeprefix(_IN_FRONT) for old, new in names.items()}
    plain = set(names.values())
    if plain == set(names) or len(plain) < len(names) or "" in plain:
        return checkpoint
    tensors = {
        names[old]: replace(tensor, name=names[old]) for old, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)
