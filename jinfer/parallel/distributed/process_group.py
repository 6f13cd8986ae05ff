"""Process group: the processes of a job, which JAX's multi-controller runtime has joined.

Each process runs the same programs. What process 0 decides reaches the others by a collective over
one CPU device of each process. JAX's coordination service notices who is lost.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import ProcessFailureError, live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfer.loader.config.source_errors import SourceError
from jinfer.parallel.distributed.broadcast import broadcast_from_first, per_device

LOST = 3  # exit status of a process that has lost another one
HEARTBEAT = 10  # seconds without a heartbeat after which JAX counts a process as lost
_WATCH = 2.0  # seconds between two checks of all processes
SILENT = 5.0  # seconds that a check may take until a process counts as not answering
_FIRST = 4096  # bytes of the first part of a message
_LONGEST = 4096  # bytes of a message over a connection
_HEADER = 8  # bytes of its length
_log = logging.getLogger("jinfer")

type Arrays = Sequence[np.ndarray]


@dataclass(eq=False)
class ProcessGroup:
    """The processes of a job, as one of them sees them.

    Attributes:
        rank: this process's number.
        addresses: of each process.
        connections: to process 0, or from it to the others: they end when a process does.
        no_collectives: why collectives between devices of several processes are not possible; "":
            they are.
        is_leaving: whether this process is about to end.
        one_way: whether messages of process 0 take no answer from the others, which then receive
            nothing else, as while they run its calls.
        exit_callbacks: called with the reason before this process ends; each may take a second.
        ordered: held while collectives are launched, which every process has to do in one order.
    """

    rank: int
    addresses: tuple[str, ...]
    connections: Mapping[int, Connection]
    no_collectives: str = ""
    is_leaving: bool = False
    one_way: bool = False
    exit_callbacks: list[Callable[[str], object]] = field(default_factory=list)
    ordered: threading.RLock = field(default_factory=threading.RLock)
    _checked: float = field(default_factory=time.monotonic)
    _ending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.addresses)

    def watch_connections(self) -> None:
        """Starts a thread that notices processes that have ended."""
        threading.Thread(target=self._watch_connections, name="lost", daemon=True).start()

    def watch_heartbeats(self) -> None:
        """Starts a thread that notices processes that do not answer JAX's coordination service."""
        threading.Thread(target=self._watch_heartbeats, name="heartbeats", daemon=True).start()

    def unavailable_reason(self) -> str:
        """Why the job does not answer: a process does not; "": all do."""
        seconds = time.monotonic() - self._checked
        if seconds < _WATCH + SILENT:
            return ""
        return f"a process of the job has not answered for {seconds:.0f} s"

    def broadcast(self, value: Any) -> Any:
        """Process 0's value on all processes."""
        return self.receive()[0] if self.rank else self.send(value)

    def gather(self, value: Any = None, error: str = "") -> list[Any]:
        """The values of all processes, on all of them.

        Args:
            error: why this process has no value.

        Raises:
            SourceError: a process has no value.
        """
        contents = self._exchange(json.dumps({"value": value, "error": error}).encode())
        found = [_split(content)[0] for content in contents]
        if "arrays" in found[0]:  # process 0 has ended the job meanwhile
            self.ended(found[0]["value"])
        for rank, each in enumerate(found):
            if each["error"]:
                raise SourceError(f"process {rank}: {each['error']}")
        return [each["value"] for each in found]

    def send(self, value: Any, arrays: Arrays = ()) -> Any:
        """Sends a value and arrays from process 0 to all others, which `receive` them.

        Raises:
            SourceError: another process has failed.
        """
        data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        with self.ordered:  # another thread may be about to change `one_way`
            if self.one_way:
                self._broadcast(_content(_head(value, arrays), data))
                return value
            contents = self._exchange(_head(value, arrays), data)
        for rank, content in enumerate(contents):
            if rank and content and (error := _split(content)[0].get("error")):
                raise SourceError(f"process {rank}: {error}")
        return value

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """What process 0 sends: a value, and arrays."""
        head, data = _split(self._broadcast(b"") if self.one_way else self._exchange(b"")[0])
        arrays, begin = [], 0
        for dtype, shape in head["arrays"]:
            array = np.frombuffer(data, dtype, int(np.prod(shape)), begin).reshape(shape)
            begin += array.nbytes
            arrays.append(array)
        return head["value"], arrays

    def end(self, status: int = 0, reason: str = "") -> None:
        """Ends the job for all other processes; this one goes on alone.

        Args:
            status: the exit status of the others.
            reason: the error that they show.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to end this process
        # A call that waits for a lost process holds the lock: the loss ends the others as well.
        if self.rank == 0 and self.ordered.acquire(timeout=SILENT):
            with suppress(jax.errors.JaxRuntimeError):
                with suppress(SourceError):  # another process has an error as well
                    self.send({"end": status, "reason": reason})
                self._exchange(b"")  # until all have it
            self.ordered.release()

    def ended(self, message: Mapping[str, Any]) -> None:
        """Ends this process, because process 0 has ended the job."""
        self._ending.acquire(blocking=False)
        with suppress(jax.errors.JaxRuntimeError):
            self._exchange(b"")
        self.leave(message["end"], message["reason"])

    def leave(self, status: int, reason: str) -> None:
        """Ends this process at once, with a line on stderr."""
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        for callback in self.exit_callbacks:
            with suppress(Exception):  # the process ends in any case
                callback(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def lost(self, other: int) -> None:
        """Ends this process because another one was lost, unless the job is about to end."""
        if self._ending.acquire(blocking=False):
            who = f"process {other} of {self.size} at {self.addresses[other]}"
            for rank, connection in self.connections.items():
                if self.rank == 0 and rank != other:
                    with suppress(OSError):
                        connection.send_bytes(json.dumps({"lost": other}).encode())
            self.leave(LOST, f"{who} was lost; the job ends")

    def fail(self, error: BaseException) -> None:
        """Ends the job because of an error on this process."""
        if isinstance(error, SourceError):  # that of another process, which waits for the end
            self.end(2, str(error))
            self.leave(2, str(error))
        _log.warning("a computation failed; waiting for the name of a lost process")
        # A collective with a lost process fails before it is known who is lost.
        time.sleep(HEARTBEAT + 2 * _WATCH)
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        text = " ".join(str(error).split())
        self.leave(LOST, f"process {self.rank} failed: {type(error).__name__}: {text}")

    def _watch_connections(self) -> None:
        ended = wait(list(self.connections.values()))[0]
        rank = next(n for n, connection in self.connections.items() if connection is ended)
        try:
            self.lost(json.loads(self.connections[rank].recv_bytes(_LONGEST))["lost"])
        except (OSError, EOFError, ValueError, KeyError):
            self.lost(rank)

    def _watch_heartbeats(self) -> None:
        every = set(range(self.size))
        while True:
            try:
                with live_devices(jax.devices()) as devices:
                    lost = every - {device.process_index for device in devices}
            except ProcessFailureError as error:
                lost = {device.process_index for device in error.failed_devices}
            except jax.errors.JaxRuntimeError:  # the coordination service is in process 0
                lost = {0}
            except RuntimeError:  # JAX's runtime has been shut down
                return
            if lost - {self.rank}:
                self.lost(min(lost - {self.rank}))
            self._checked = time.monotonic()
            time.sleep(_WATCH)

    @cached_property
    def _devices(self) -> tuple[jax.Device, ...]:
        """One device of each process, a CPU where JAX knows any."""
        try:
            devices = jax.devices("cpu")
        except RuntimeError:
            devices = jax.devices()
        first = {device.process_index: device for device in reversed(devices)}
        return tuple(first[rank] for rank in range(self.size))

    @cached_property
    def _add(self) -> Callable[..., Any]:
        mesh = Mesh(np.array(self._devices), ("process",))
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=whole)

    def _exchange(self, head: bytes, data: bytes = b"") -> list[bytes]:
        """What each process passes, on all of them: a JSON object, and data that follow it."""
        content = _content(head, data)
        with self.ordered:
            rows = self._rows(content[:_FIRST], _FIRST)
            sizes = [int.from_bytes(row[:_HEADER].tobytes()) + _HEADER for row in rows]
            if (rest := max(sizes) - _FIRST) > 0:
                more = self._rows(content[_FIRST:], _padded(rest))
                rows = np.concatenate([rows, more], axis=1)
        return [row[_HEADER:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _rows(self, own: bytes, size: int) -> np.ndarray:
        """The bytes of each process, as the sum of rows of which each has set its own."""
        rows = np.zeros((1, self.size, size), np.uint8)
        rows[0, self.rank, : len(own)] = np.frombuffer(own, np.uint8)
        return np.asarray(self._add(self._shared(rows)).addressable_data(0))

    def _broadcast(self, content: bytes) -> bytes:
        """What process 0 passes, on all processes."""
        with self.ordered:
            first = self._piece(content[:_FIRST], _FIRST)
            size = int.from_bytes(first[:_HEADER]) + _HEADER
            more = self._piece(content[_FIRST:], _padded(size - _FIRST)) if size > _FIRST else b""
        return (first + more)[_HEADER:size]

    def _piece(self, content: bytes, size: int) -> bytes:
        piece = np.zeros(size, np.uint8)
        piece[: len(content)] = np.frombuffer(content, np.uint8)
        (moved,) = broadcast_from_first(self._devices)([self._shared(piece)])
        return np.asarray(moved.addressable_data(0)).tobytes()

    def _shared(self, own: np.ndarray) -> Array:
        """An array with a part of each process along its first axis."""
        return per_device([jax.device_put(own, self._devices[self.rank])], self._devices)


def _content(head: bytes, data: bytes) -> bytes:
    """A message: its length, and the length of its JSON object, before them."""
    content = len(head).to_bytes(_HEADER) + head + data if head else b""
    return len(content).to_bytes(_HEADER) + content


def _padded(size: int) -> int:
    """A size for which a program is compiled: a power of two."""
    return 1 << max(0, size - 1).bit_length()


def _head(value: Any, arrays: Arrays = ()) -> bytes:
    """The JSON object of a message from process 0."""
    described = [[array.dtype.str, array.shape] for array in arrays]
    return json.dumps({"value": value, "arrays": described}).encode()


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON object of a message, and the data that follow it."""
    end = _HEADER + int.from_bytes(content[:_HEADER])
    return json.loads(content[_HEADER:end]), content[end:]
