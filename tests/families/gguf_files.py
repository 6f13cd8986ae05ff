"""Writing GGUF files of a family."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes a file with these keys of the architecture; numbers get the types that others use.

    xIELU's keys have no architecture before them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        bool: writer.add_bool,
        str: writer.add_string,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        name = key if key.startswith("xielu.") else f"{architecture}.{key}"
        add[type(value)](name, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
