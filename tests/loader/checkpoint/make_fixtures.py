"""Makes the files in data/ with PyTorch, which the project itself does not use.

Run in an environment of its own: `python -m venv torchenv && torchenv/bin/pip install torch numpy`,
then `torchenv/bin/python tests/loader/checkpoint/make_fixtures.py`. Made with torch 2.13.
"""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parent / "data"

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def every_type() -> dict[str, torch.Tensor]:
    """A tensor [2, 3] of each element type."""
    values = torch.tensor([[0.5, 1.0, 2.0], [3.0, 4.0, 96.0]])
    return {f"type.{name}": values.to(dtype) for name, dtype in TYPES.items()}


def every_view() -> dict[str, torch.Tensor]:
    """Tensors that are not the whole of their storage, in its order."""
    base = torch.arange(24, dtype=torch.float32)
    grid = base.view(4, 6)
    with_attribute = torch.ones(2)
    with_attribute.note = "kept beside the values"
    parameter = torch.nn.Parameter(torch.full((2, 2), 3.0, dtype=torch.bfloat16))
    noted = torch.nn.Parameter(torch.full((3,), 4.0))
    noted.note = "kept beside the values"
    return {
        "view.whole": base,
        "view.tied": base,
        "view.grid": grid,
        "view.transposed": grid.t(),
        "view.permuted": base.view(2, 3, 4).permute(2, 0, 1),
        "view.offset": base[5:11],
        "view.columns": grid[:, 2:5],
        "view.steps": base[1::3],
        "view.expanded": base[:4].view(4, 1).expand(4, 5),
        "view.windows": base.as_strided((5, 4), (2, 1)),
        "view.scalar": base[7],
        "view.empty": base[:0].view(0, 3),
        "view.one": base[3:4].view(1, 1, 1),
        "parameter.plain": parameter,
        "parameter.noted": noted,
        "attribute": with_attribute,
    }


def trained() -> dict[str, object]:
    """What a training script saves: model, optimizer, numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "loss": 0.25,
        "name": "tiny",
        "blob": b"\x00\xff",
        "best": None,
    }


def stored(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as bytes."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().copy()


def main() -> None:
    DATA.mkdir(exist_ok=True)
    state = collections.OrderedDict(every_type() | every_view())
    torch.save(state, DATA / "zip.pt")
    torch.save(state, DATA / "legacy.pt", _use_new_zipfile_serialization=False)
    for protocol in (3, 4, 5):
        small = {"a.weight": torch.arange(3.0), "a.bias": torch.ones(2), "steps": 7}
        torch.save(small, DATA / f"protocol{protocol}.pt", pickle_protocol=protocol)
    training = trained()
    torch.save(training, DATA / "trained.pt")
    torch.save(torch.nn.Linear(2, 2), DATA / "module.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(DATA / "script.pt")
    state.update({f"trained.{key}": value for key, value in training["model"].items()})  # type: ignore[attr-defined]
    arrays: dict[str, Any] = {}
    for name, tensor in state.items():
        arrays[f"{name}|{NAMES[tensor.dtype]}|{list(tensor.shape)}"] = stored(tensor)
    np.savez_compressed(DATA / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
