"""Pickle values: the globals that a checkpoint may name, and the inert values for them.

The table `GLOBALS` is closed: other names are refused. Nothing here imports or calls a name in a
file; "calling" a global makes a plain record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.mapped_file import MAX_DIMS


class PickleError(ValueError):
    """A value that is not what torch.save writes; the machine adds the file and the offset."""


@dataclass(frozen=True, eq=False, slots=True)
class PickleDict:
    """A dict or OrderedDict as a list of pairs.

    A dict would be slow with keys that collide, and nested keys are deep to hash.
    """

    pairs: list[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """Bytes outside the pickle: `size` bytes from `offset` in the storage named `key`.

    Attributes:
        type: element type; empty if the tensor has it.
        key: name of the storage in its container.
        total: size of the whole storage.
    """

    type: str
    key: str
    total: int
    offset: int
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class StridedTensor:
    """A tensor over a storage; offset and strides are counted in elements, as PyTorch does."""

    storage: Storage
    type: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Opaque:
    """A value that readers do not use: a device, bytes, or settings of a training program."""

    kind: str


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A name the pickle may use: an element type, or a constructor where `call` is given."""

    name: str
    type: str = ""
    call: Callable[[tuple[Any, ...]], Any] | None = None


def read_persistent_id(pid: object) -> Storage:
    """The storage that torch.save's persistent id names.

    It is ("storage", class, key, location, elements), and in the format before PyTorch 1.6 a
    sixth item: None, or (key, offset, elements) of a view of that storage.

    Raises:
        PickleError: any other value.
    """
    if isinstance(pid, tuple) and pid[:1] == ("module",):
        raise PickleError("holds a whole module with its code; save model.state_dict() instead")
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise PickleError("a persistent id is not that of a storage")
    kind, key, count = pid[1], pid[2], pid[4]
    if not isinstance(kind, Global) or kind.name not in _STORAGES:
        raise PickleError("a persistent id does not name a storage class")
    if not isinstance(key, str) or not _are_sizes([count]):
        raise PickleError("a storage's key is not text, or its size not a number")
    item = DTYPES[kind.type].itemsize if kind.type else 1
    offset, size = 0, count
    if len(pid) == 6 and pid[5] is not None:
        view = pid[5]
        if not isinstance(view, tuple) or len(view) != 3 or not _are_sizes(view[1:]):
            raise PickleError("a storage's view is not (key, offset, size)")
        offset, size = view[1], view[2]
        if offset + size > count:
            raise PickleError(f"a storage's view ends at {offset + size} of {count} elements")
    return Storage(kind.type, key, count * item, offset * item, size * item)


def _are_sizes(values: Any) -> bool:
    """Whether values are non-negative integers below 2**63; a bool is none."""
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _strided(storage: object, offset: object, shape: object, strides: object, kind: str) -> Any:
    if not isinstance(storage, Storage):
        raise PickleError("a tensor is not made of a storage")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise PickleError("a tensor's shape and strides are not tuples")
    if len(shape) > MAX_DIMS or len(shape) != len(strides):
        reason = f"a tensor has {len(shape)} dimensions and {len(strides)} strides"
        raise PickleError(f"{reason}; at most {MAX_DIMS} are read")
    if not (_are_sizes(shape) and _are_sizes(strides) and _are_sizes([offset])):
        raise PickleError("a tensor's offset, shape or strides are not non-negative integers")
    return StridedTensor(storage, kind, offset, shape, strides)  # type: ignore[arg-type]


def _rebuild_tensor(args: tuple[Any, ...]) -> Any:
    """(storage, offset, shape, strides), then flags that change no values."""
    if not 4 <= len(args) <= 7:
        raise PickleError(f"a tensor is made of 4 to 7 values, not {len(args)}")
    if len(args) == 7:
        _refuse_lazy(args[6])
    storage = args[0]
    if not isinstance(storage, Storage) or not storage.type:
        raise PickleError("a tensor is not made of a typed storage")
    return _strided(storage, args[1], args[2], args[3], storage.type)


def _rebuild_tensor_v3(args: tuple[Any, ...]) -> Any:
    """(untyped storage, offset, shape, strides, requires_grad, hooks, dtype[, metadata])."""
    if len(args) not in (7, 8):
        raise PickleError(f"a tensor is made of 7 or 8 values, not {len(args)}")
    if len(args) == 8:
        _refuse_lazy(args[7])
    dtype = args[6]
    if not isinstance(dtype, Global) or not dtype.name.startswith("torch.") or not dtype.type:
        raise PickleError("a tensor's dtype is not one")
    return _strided(args[0], args[1], args[2], args[3], dtype.type)


def _refuse_lazy(metadata: object) -> None:
    """PyTorch notes here that a tensor is the conjugate or negative of what is stored."""
    if isinstance(metadata, PickleDict) and metadata.pairs:
        reason = "a tensor is a lazy conjugate or negative view"
        raise PickleError(reason + "; save it after resolve_conj() and resolve_neg()")


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    if not 1 <= len(args) <= 4 or not isinstance(args[0], StridedTensor):
        raise PickleError("a parameter is not made of a tensor")
    return args[0]


def _rebuild_from_type(args: tuple[Any, ...]) -> Any:
    """(constructor, class, its arguments, attributes): a tensor that had Python attributes."""
    made_of = args[0].call if args and isinstance(args[0], Global) else None
    known = made_of in (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter)
    if made_of is None or not known or len(args) != 4 or not isinstance(args[2], tuple):
        raise PickleError("a tensor with attributes is not made of a tensor")
    return made_of(args[2])


def _size(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or not isinstance(args[0], tuple):
        raise PickleError("torch.Size is not made of a tuple")
    return args[0]


def _ordered_dict(args: tuple[Any, ...]) -> Any:
    # Python 2 gives the pairs at once; the list is shared, not copied: a copy for each of many
    # calls would take more memory than the file accounts for
    if not args:
        return PickleDict([])
    if len(args) != 1 or not isinstance(args[0], list):
        raise PickleError("OrderedDict is not made of a list of pairs")
    return PickleDict(args[0])


_TORCH_DTYPES = {
    "F64": ("float64", "double"),
    "F32": ("float32", "float"),
    "F16": ("float16", "half"),
    "BF16": ("bfloat16",),
    "I64": ("int64", "long"),
    "I32": ("int32", "int"),
    "I16": ("int16", "short"),
    "I8": ("int8",),
    "U64": ("uint64",),
    "U32": ("uint32",),
    "U16": ("uint16",),
    "U8": ("uint8",),
    "BOOL": ("bool",),
    "C64": ("complex64", "cfloat"),
    "C128": ("complex128", "cdouble"),
    "F8_E4M3": ("float8_e4m3fn",),
    "F8_E5M2": ("float8_e5m2",),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz",),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz",),
    "F8_E8M0": ("float8_e8m0fnu",),
}
_TORCH_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "",
    "_UntypedStorage": "",
}
_STORAGES = {
    f"{module}.{name}": kind
    for module in ("torch", "torch.cuda", "torch.storage")
    for name, kind in _TORCH_STORAGES.items()
}
_DTYPES = {f"torch.{name}": kind for kind, names in _TORCH_DTYPES.items() for name in names}
# Classes of values that training programs save: arguments, paths, times, NumPy's numbers and
# arrays. They are not constructed, and their attributes are left out.
_TRAINING_VALUES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset")
    ),
    *(
        f"{module}.{kind}Path"
        for module in ("pathlib", "pathlib._local")
        for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")
    ),
    *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray.scalar", "multiarray._reconstruct", "numeric._frombuffer")
    ),
    "numpy.dtype",
)
# Dicts of a kind of their own, to which items may be given afterwards.
_DICTS = (
    "collections.defaultdict",
    "collections.Counter",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
)
# Factories of a defaultdict.
_MAKERS = tuple(
    f"{module}.{name}"
    for module in ("builtins", "__builtin__")
    for name in ("dict", "float", "int", "list")
)
_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **dict.fromkeys(_TRAINING_VALUES, lambda args: Opaque("setting of a training program")),
    "collections.OrderedDict": _ordered_dict,
    # A state dict has no defaultdict.
    **{name: lambda args: PickleDict([]) for name in _DICTS},
    "torch.Size": _size,
    "torch.device": lambda args: Opaque("device"),
    "_codecs.encode": lambda args: Opaque("bytes"),  # protocol 2 writes bytes so
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch.nn.parameter.Parameter": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}
GLOBALS: dict[str, Global] = {
    **{name: Global(name, kind) for name, kind in (_STORAGES | _DTYPES).items()},
    **{name: Global(name, call=call) for name, call in _CALLS.items()},
    **{name: Global(name) for name in ("torch.Tensor", "numpy.ndarray", *_MAKERS)},
}


_INSTEAD = {  # advice for globals that common programs write
    "torch._utils._rebuild_wrapper_subclass": "tensors of a quantizer's own class, as torchao's, "
    "are not read from pickles; save the model with safetensors, or use the original weights"
}


def find_global(module: str, name: str) -> Global:
    """Return the inert value for `module.name`.

    Raises:
        PickleError: it is not in the closed list; the message names it.
    """
    # a dot inside a name is an attribute of an attribute: never written by torch.save
    found = None if "." in name else GLOBALS.get(f"{module}.{name}")
    if found is None:
        refused = f"{module[:100]}.{name[:100]}"
        refused = refused if refused.isprintable() else ascii(refused)
        known = _INSTEAD.get(f"{module}.{name}", "a checkpoint must not call code")
        raise PickleError(f"refuses to run {refused} ({known})")
    return found
