"""Opening a checkpoint: the first bytes of a file, and the names in a folder, tell the format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import (
    ZIP_MAGIC,
    Checkpoint,
    CheckpointError,
    Tensor,
)
from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.loader.checkpoint.llama2c import MAGIC as LLAMA2C_MAGIC
from jinfer.loader.checkpoint.llama2c import looks_like_v0, open_llama2c
from jinfer.loader.checkpoint.mapped_file import (
    MAX_JSON_BYTES,
    MappedFile,
    parse_object,
    why_unreadable,
)
from jinfer.loader.checkpoint.native_checkpoint import as_native
from jinfer.loader.checkpoint.orbax import DESCRIPTION, FOLDER, open_orbax
from jinfer.loader.checkpoint.safetensors import open_safetensors
from jinfer.sandbox.safe_files import dangling_link

Reader = Callable[[Path], Checkpoint]


def open_pickle(path: Path) -> Checkpoint:
    """Open a file of PyTorch; see `jinfer.loader.checkpoint.pickle`."""
    # Imported here, because other formats do not need these modules.
    from jinfer.loader.checkpoint import pickle

    return pickle.open_pickle(path)


_HEAD = 512
_SUFFIXES: dict[str, Reader] = {
    ".safetensors": open_safetensors,
    ".gguf": open_gguf,
    ".bin": open_llama2c,  # pickles and zip archives have marks of their own
    ".pt": open_pickle,
    ".pth": open_pickle,
}
# files in the folders of weights that are no weights
_IGNORED: tuple[str, ...] = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "random_states*",
)
_IGNORED += ("tokenizer.bin", "scaler.pt", "adapter_model.*")
_SHARD = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.\w+)")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint: a file, or a folder with a file or its shards.

    A folder is searched for, in this order: model.orbax, a .safetensors index, .safetensors files,
    a PyTorch index, PyTorch files, a .gguf (one file or one split set), a single other .bin.

    Args:
        path: a .safetensors, .gguf, PyTorch or llama2.c file, or a folder.

    Raises:
        CheckpointError: the folder has no checkpoint, or several.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise CheckpointError(path, why_unreadable(error)) from None
    checkpoint = _open_folder(path) if is_folder else _open_file(path)
    wrapped = checkpoint.format in ("safetensors", "pickle")
    return as_native(unwrapped(checkpoint) if wrapped else checkpoint)


def _open_file(path: Path) -> Checkpoint:
    return _reader(MappedFile(path))(path)


def _reader(file: MappedFile) -> Reader:
    """The reader of a file, by its content; by its suffix only where the content is damaged."""
    head = file.read(0, min(_HEAD, file.size))
    if head.startswith(b"GGUF"):
        return open_gguf
    if head.startswith(LLAMA2C_MAGIC):
        return open_llama2c
    if head.startswith(ZIP_MAGIC) or head[257:262] == b"ustar":
        return open_pickle
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return open_safetensors
    # before the pickle's test: a dim of 640 also begins with the bytes 0x80 0x02
    if looks_like_v0(file):
        return open_llama2c
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return open_pickle
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        reason = "is a GGML file older than GGUF: convert it with llama.cpp of August 2023"
        raise CheckpointError(file.path, reason, 0)
    suffix = file.path.suffix.lower()
    if suffix in _SUFFIXES and not _is_text(head):
        return _SUFFIXES[suffix]
    begins = f"; it is a text that begins {head[:40].decode()!r}" if _is_text(head) else ""
    reason = "is not a safetensors, PyTorch, GGUF or llama2.c file: none of their marks"
    raise CheckpointError(file.path, reason + begins, 0)


def _is_text(head: bytes) -> bool:
    return bool(head) and head.isascii() and "".join(head.decode().split()).isprintable()


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError as error:
        raise CheckpointError(folder, why_unreadable(error)) from None
    if DESCRIPTION in names or (folder / FOLDER).is_dir():
        return open_orbax(folder / DESCRIPTION)
    names = [name for name in names if not any(fnmatch(name, rule) for rule in _IGNORED)]
    for index, patterns, reader in (
        ("model.safetensors.index.json", ("*.safetensors",), open_safetensors),
        ("pytorch_model.bin.index.json", ("pytorch_model*.bin", "*.pth", "*.pt"), open_pickle),
    ):
        if index in names:
            return open_index(folder / index, reader)
        for pattern in patterns:
            if found := _choose(folder, names, pattern):
                return _merge(folder, [reader(file) for file in found])
    return _open_single(folder, names)


def _choose(folder: Path, names: list[str], pattern: str) -> list[Path]:
    """Choose the weight files that match: a single file, model.*, or a complete set."""
    found = [name for name in names if fnmatch(name, pattern)]
    # Meta's and Mistral's copies of weights that are there in Hugging Face's layout too
    rest = [name for name in found if not name.startswith("consolidated")]
    found = rest or found
    main = [name for name in found if Path(name).stem in ("model", "pytorch_model")]
    found = main or found
    sets = {match[1] for name in found if (match := _SHARD.fullmatch(name))}
    if len(sets) == 1 and all(_SHARD.fullmatch(name) for name in found):
        _check_complete(folder, found)
    elif len(found) > 1:
        listed = ", ".join(found[:5])
        raise CheckpointError(folder, f"holds several checkpoints ({listed}): name one of them")
    return [folder / name for name in found]


def _check_complete(folder: Path, names: list[str]) -> None:
    """Every shard of a set numbered 1 to N (or 0 to N - 1) is there."""
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    totals = {int(match[3]) for match in matches}
    total = max(totals)
    numbers = {int(match[2]) for match in matches}
    first = 0 if 0 in numbers else 1
    missing = [n for n in range(first, min(first + total, 1000)) if n not in numbers]
    if len(totals) > 1 or missing or len(names) != total:
        _refuse_dangling(folder)
        reason = f"shards {missing[:5]} of {total} are missing"
        if not missing:
            reason = f"{len(names)} shards do not make one set of {total}"
        raise CheckpointError(folder, f"{matches[0][1]}: {reason}")


def _refuse_dangling(folder: Path) -> None:
    """Raise if weights are dangling links, as in a cache that was emptied in part."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in _SUFFIXES or path.name.endswith(".index.json")
        if weights and (reason := dangling_link(path)):
            raise CheckpointError(path, reason)


MMPROJ = "*mmproj*.gguf"  # llama.cpp's files of encoders of images


def _open_single(folder: Path, names: list[str]) -> Checkpoint:
    # A file of an encoder of images belongs to another, the language model's.
    texts = [name for name in names if not fnmatch(name.lower(), MMPROJ)]
    if found := _choose(folder, texts, "*.gguf"):
        return open_gguf(found[0])
    others = [name for name in names if name.endswith(".bin")]
    if len(others) == 1:
        return _open_file(folder / others[0])
    if others:
        listed = ", ".join(others[:5])
        raise CheckpointError(folder, f"holds several checkpoints ({listed}): name one of them")
    _refuse_dangling(folder)
    raise CheckpointError(
        folder,
        "holds no checkpoint: looked for model.safetensors.index.json, *.safetensors, "
        "pytorch_model.bin.index.json, pytorch_model*.bin, *.pth, *.pt, *.gguf and a single *.bin",
    )


_MAX_NAME = 255  # bytes, as file systems have it


def open_index(index: Path, reader: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Open the shards that an index names (Hugging Face's `*.index.json`) as one checkpoint.

    If a tensor is in two shards, the index decides; tensors that the index does not name are left
    out.

    Raises:
        CheckpointError: a bad index, a path outside the folder, a missing shard, a tensor that
            its shard lacks.
    """
    weight_map = _read_weight_map(index)
    folder = index.parent
    files = sorted(set(weight_map.values()))
    for name in files:
        if not (folder / name).is_file():
            why = dangling_link(folder / name) or "is not in the folder"
            raise CheckpointError(index, f"names the shard {name!r}, which {why}")
    shards = {name: reader(folder / name) for name in files}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            reason = f"says that {name!r} holds {tensor[:200]!r}, which it does not"
            raise CheckpointError(index, reason)
    kept = {
        name: {key: t for key, t in shard.tensors.items() if weight_map.get(key) == name}
        for name, shard in shards.items()
    }
    return _merge(folder, [replace(shard, tensors=kept[name]) for name, shard in shards.items()])


def _read_weight_map(index: Path) -> dict[str, str]:
    file = MappedFile(index)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(index, f"is an index of {file.size} bytes, above {MAX_JSON_BYTES}")
    weight_map = parse_object(index, file.read(0, file.size)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "has no weight_map from tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            reason = f"weight_map of {tensor[:200]!r} is not a plain file name in the same folder"
            raise CheckpointError(index, reason)
    return weight_map


def _is_plain(name: str) -> bool:
    """Whether a name stays in its folder. Links are followed: download caches consist of links."""
    return (
        name not in ("", ".", "..")
        and not set(name) & set("/\\\0:")
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME
    )


def _merge(path: Path, shards: Sequence[Checkpoint]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    owner: dict[str, Path] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in owner:
                reason = f"tensor {name[:200]!r} is also in {owner[name].name}"
                raise CheckpointError(shard.path, reason)
            owner[name] = shard.path
            tensors[name] = tensor
        for key, value in shard.metadata.items():
            metadata.setdefault(key, value)
    return Checkpoint(path, shards[0].format, tensors, metadata)


_ANYWHERE = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_IN_FRONT = "module."


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Remove the prefixes of training wrappers from the names of tensors.

    DataParallel prefixes all names with `module.`; torch.compile, FSDP and activation checkpointing
    insert their prefixes anywhere. Nothing changes if two tensors would get the same name.
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
