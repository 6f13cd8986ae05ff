"""Parallelism settings (`[partition]`): pipeline and tensor parallelism, CPU offload."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from jinfer.modelspec.bounded_types import Count, Fraction, Size
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table

AUTO, CPU = "auto", "cpu"
_EXAMPLE = '"0&1;2&3" is two stages of two devices each'


@dataclass(frozen=True)
class MeshSpec:
    """A device mesh, in device order: `partition.mesh`.

    Attributes:
        pipe: pipeline parallel size: number of stages, each with some of the layers.
        tensor: tensor parallel size: devices of a stage, over which its layers are sharded.
    """

    pipe: Size = 1
    tensor: Size = 1


@dataclass(frozen=True)
class PartitionSpec:
    """How a model is divided over devices: `[partition]`.

    Attributes:
        devices: numbers of devices: `;` separates pipeline stages, `&` the tensor parallel devices
            of a stage; "cpu" is a stage on the host. "auto": all devices, divided as the cost model
            finds best. none: the first device alone.
        mesh: the same as a grid, `{ pipe = 2, tensor = 2 }`.
        layers: number of layers of each stage; none: such that stages have about equally many
            bytes.
        cpu_layers: number of first layers that run on the host, as a stage before all others.
        host_embeddings: whether the embedding table stays on the host, which sends its vectors.
        host_kv_cache: fraction of the KV cache's blocks that are in host memory, where attention
            over them is computed.
        streamed_layers: weight offload: number of layers whose weights stay in host memory and are
            copied to the device while the layers before them compute; the device has buffers for
            two of them.
        lanes: pipeline micro-batches: groups of sequences in flight at a time; none: as many as
            there are stages.
    """

    devices: str | None = None
    mesh: MeshSpec | None = None
    layers: tuple[Count, ...] | None = None
    cpu_layers: Count = 0
    host_embeddings: bool = False
    host_kv_cache: Fraction = 0.0
    streamed_layers: Count = 0
    lanes: Size | None = None

    def check(self) -> tuple[str, str] | None:
        """The first invalid value: its key and the reason."""
        if self.devices is not None and self.mesh is not None:
            return "mesh", "and devices say the same thing; give one of them"
        if 0 < self.streamed_layers < 3:
            reason = f"{self.streamed_layers} saves nothing: a device keeps room for two; take 0"
            return "streamed_layers", f"{reason}, or 3 and more"
        return None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is divided."""
        named = self.devices is not None or self.mesh is not None
        on_host = self.cpu_layers or self.host_embeddings
        return not (named or on_host or self.host_kv_cache or self.streamed_layers)


def read_partition(written: Any, values: SpecValues) -> PartitionSpec:
    """Reads the table. Raises `SpecError`."""
    table = dict(as_table(written, values.path, "partition"))
    devices = table.pop("devices", None)
    if type(devices) is int:
        devices = str(devices)
    if devices is not None and not isinstance(devices, str):
        reason = f"{show_value(devices)} is not a text; {_EXAMPLE}"
        raise SpecError(values.path, "partition.devices", reason)
    # Inferflow's bars are not alternatives of a value.
    spec: PartitionSpec = read_value(PartitionSpec, table, values, "partition")
    whole = replace(spec, devices=devices)
    if wrong := whole.check():
        raise SpecError(values.path, f"partition.{wrong[0]}", wrong[1])
    if devices is not None:
        device_groups(devices, values.path)
    return whole


def device_groups(devices: str, path: object) -> tuple[tuple[str, ...], ...]:
    """The devices of each stage, in Inferflow's grammar: `;` or `,` and `&` or `|`.

    "auto" has none. Raises `SpecError`.
    """

    def wrong(reason: str) -> SpecError:
        return SpecError(path, "partition.devices", f"{show_value(devices)} {reason}; {_EXAMPLE}")

    if devices.strip() == AUTO:
        return ()
    groups = []
    for part in re.split("[;,]", devices):
        names = tuple(name.strip().lower() for name in re.split("[&|]", part))
        for name in names:
            if name != CPU and not re.fullmatch(r"[0-9]{1,5}", name):
                raise wrong(
                    f"has {show_value(name)}, which is neither the number of a device nor cpu"
                )
        groups.append(tuple(name if name == CPU else str(int(name)) for name in names))
    every = [name for group in groups for name in group]
    twice = next((name for name in every if every.count(name) > 1), None)
    if twice is not None:
        raise wrong(f"names device {twice} twice")
    if any(CPU in group and len(group) > 1 for group in groups):
        raise wrong("has cpu and other devices in a stage, but the host is a stage of its own")
    if len({len(group) for group in groups if CPU not in group}) > 1:
        raise wrong("has stages of different numbers of devices")
    return tuple(groups)
