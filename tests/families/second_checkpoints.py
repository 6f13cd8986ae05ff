"""Second checkpoints of families: keys of config.json at values that the goldens do not have.

`second_checkpoints.npz` has, of each, a JSON text (config.json, the shapes of the tensors, the keys
that were changed with their old and new values) and every fourth row of what transformers 5.24
gives for it in float32: logits, or hidden states. Weights are drawn by name. A key is there if
another value of it changes transformers' logits, and by more than 1e-3.

`python -m tests.families.second_checkpoints` computes them all and writes the reference page
docs/reference/config_keys.md.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jinfer import LLM
from tests.families.drawn_weights import drawn

FILE = Path(__file__).with_name("second_checkpoints.npz")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config_keys.md"
TEXT = np.random.default_rng(5).integers(3, 96, 40).tolist()
ANSWER = TEXT[7:31]  # what the decoder of an encoder-decoder is given


@cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


def names() -> list[str]:
    """The names of the checkpoints."""
    return [key.removesuffix(".made") for key in _stored() if key.endswith(".made")]


def made(name: str) -> dict[str, Any]:
    """A checkpoint's family, config, shapes of tensors, and keys that were changed."""
    text: dict[str, Any] = json.loads(bytes(_stored()[f"{name}.made"]))
    return text


def write(folder: Path, model: dict[str, Any]) -> None:
    """Writes a checkpoint as `made` describes it."""
    tensors = {tensor: drawn(tensor, tuple(shape)) for tensor, shape in model["shapes"].items()}
    (folder / "config.json").write_text(json.dumps(model["config"]))
    save_file(tensors, folder / "model.safetensors")


def difference(name: str, folder: Path) -> float:
    """How far jinfer's logits, or hidden states, are from those of transformers, at most."""
    model = made(name)
    write(folder, model)
    llm = LLM(folder, dtype="float32")
    if model["kind"] == "hidden":
        (got,) = llm.hidden([TEXT])
    elif llm.spec.type == "encoder-decoder":
        (got,) = llm.logits([ANSWER], encoder_ids=[TEXT])
    else:
        (got,) = llm.logits([TEXT])
    return float(np.max(np.abs(np.asarray(got)[3::4] - _stored()[f"{name}.logits"])))


def lines() -> Iterator[str]:
    """The rows of docs/reference/config_keys.md, without the differences."""
    for name in names():
        model = made(name)
        for key, (old, new) in model["changed"].items():
            yield f"| `{model['family']}` | {name} | `{key}` | {_shown(old)} | {_shown(new)} |"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`" if len(text) < 60 else f"`{text[:56]} ...`"


HEAD = """# Keys of config.json

For each [family](../models.md) that transformers 5.24 implements, these keys were changed to a
second value in a tiny checkpoint. The last column is the largest difference between the logits of
jinfer and transformers in float32. Keys that change the computation and that no specification
follows are rejected by name ([errors](../specs.md#errors)).

| family | checkpoint | key | first value | second value | largest difference |
|---|---|---|---|---|---|
"""


def write_page() -> None:
    """Computes all checkpoints and writes their rows."""
    found = {}
    for name in names():
        with TemporaryDirectory() as folder:
            found[name] = difference(name, Path(folder))
    rows = [f"{line} {found[line.split(' | ')[1]]:.1e} |" for line in lines()]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_page()
