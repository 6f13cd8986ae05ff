"""Trace: the captured values (activations) of one prompt, as arrays with named axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.api.activation_names import nearest
from jinfer.engine.output.completion import import_pandas
from jinfer.modelspec.spec_errors import show_value

if TYPE_CHECKING:
    from jaxtyping import Float

_SHOWN = 12  # names that a short text lists


class Trace(Mapping[str, "Float[np.ndarray, '...']"]):
    """Captured values by name, float32: `trace["decoder.3.x"]` is [tokens, hidden].

    Attributes:
        axes: name of each value -> names of its axes.
        ids: token ids of the prompt, and of the answer after it if there is one.
        tokens: the same as texts.
        prompt_tokens: how many of them are the prompt's.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        axes: Mapping[str, tuple[str, ...]],
        ids: Sequence[int],
        tokens: Sequence[str],
        prompt_tokens: int,
    ) -> None:
        self._values, self.axes = dict(values), dict(axes)
        self.ids, self.tokens, self.prompt_tokens = list(ids), list(tokens), prompt_tokens

    @property
    def names(self) -> list[str]:
        """The names of the values."""
        return [*self._values]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self._values.values())

    def __getitem__(self, name: str) -> Float[np.ndarray, ...]:
        if name not in self._values:
            hint = nearest(str(name), self._values).removesuffix(" llm.names() lists all")
            captured = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self) > _SHOWN else "")
            raise KeyError(f"{show_value(name)} was not captured{hint} captured: {captured}")
        return self._values[name]

    # Arrays have no single answer to a comparison, which `Mapping` would ask them for.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return self.names

    def to_pandas(self, name: str) -> Any:
        """A value as a table: a row for each token, head and so on, a column for each last index.

        Raises:
            RequestError: pandas is not installed.
        """
        pd = import_pandas()
        value, (*rows, column) = self[name], self.axes[name]
        index = pd.MultiIndex.from_product([range(size) for size in value.shape[:-1]], names=rows)
        columns = pd.Index(range(value.shape[-1]), name=column)
        frame = pd.DataFrame(value.reshape(-1, value.shape[-1]), columns=columns)
        if rows:
            frame.index = index
        if rows == ["tokens"]:
            frame.index = pd.Index(self.tokens, name="tokens")
        return frame

    def __repr__(self) -> str:
        shown = [f"{name} {list(self._values[name].shape)}" for name in self.names[:_SHOWN]]
        shown += ["..."] if len(self) > _SHOWN else []
        return f"Trace({len(self.ids)} tokens: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(', '.join(self.axes[name]))}</td>"
            f"<td>{' × '.join(map(str, value.shape))}</td><td>{_deviation(value):.3g}</td></tr>"
            for name, value in self._values.items()
        )
        head = "<tr><th>name</th><th>axes</th><th>shape</th><th>root mean square</th></tr>"
        text = escape("".join(self.tokens))[:2000]
        title = f"{len(self.ids)} tokens, {len(self)} values, {self.nbytes / 2**20:.1f} MiB"
        table = f'<table style="text-align:left">{head}{rows}</table>'
        words = f'<div style="white-space:pre-wrap;opacity:.7">{text}</div>'
        return f"<details><summary>{title}</summary>{words}{table}</details>"


def _deviation(value: np.ndarray) -> float:
    finite = value[np.isfinite(value)]
    return float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0
