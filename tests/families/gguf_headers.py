"""Headers of GGUF files: keys, tensor names and shapes as llama.cpp's converter wrote them.

`gguf_headers.json` has those of tiny checkpoints, most of them goldens, converted by llama.cpp of
October 2026. Of some there is no converted golden because the converter refuses its config or
changes its weights (minimax, hunyuan_dense, mimo_v2_flash, dots1, bitnet): keys were changed until
it went through. Two were made of other goldens by leaving their experts out.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gguf_headers.json")


@dataclass(frozen=True)
class Header:
    """What one file says.

    Attributes:
        name: of the checkpoint.
        family: jinfer's, which has to be found.
        architecture: GGUF's.
        keys: of the architecture, without its name.
        shapes: of its tensors, outermost axis first.
    """

    name: str
    family: str
    architecture: str
    keys: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@cache
def headers() -> tuple[Header, ...]:
    """All of them."""
    return tuple(
        Header(
            name,
            each["family"],
            each["architecture"],
            each["keys"],
            dict(_expanded(each["tensors"])),
        )
        for name, each in json.loads(FILE.read_text()).items()
    )


def _expanded(tensors: Mapping[str, list[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names with "{0,1,2}" for several layers, written out."""
    for name, shape in tensors.items():
        pieces = [re.split(",", part) for part in re.split(r"\{(.*?)\}", name)]
        for chosen in itertools.product(*pieces):
            yield "".join(chosen), tuple(shape)
