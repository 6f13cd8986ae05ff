"""View: a picture of what a model does, for a notebook, a file or a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinfer.engine.output.completion import data_frame
from jinfer.html.html_page import fragment, page, picture
from jinfer.sampling.request_errors import RequestError

if TYPE_CHECKING:
    import numpy as np

type Table = Mapping[str, Sequence[Any] | np.ndarray]
MARGIN = 28  # pixels left and right of a drawing together
_TITLE, _LINE, _CHARACTER = 52, 20, 7  # pixels: title and margins, a line about it, a character
LEAST = 640  # pixels of width


@dataclass(frozen=True)
class Drawn:
    """A part of a view.

    Attributes:
        markup: HTML, well-formed as XML.
        width, height: pixels that it takes, where nothing is folded.
    """

    markup: str
    width: int
    height: int


def beneath(*parts: Drawn) -> Drawn:
    """Parts one below the other."""
    return Drawn(
        "".join(part.markup for part in parts),
        max(part.width for part in parts),
        sum(part.height for part in parts),
    )


@dataclass(frozen=True, repr=False)
class View:
    """A view; a notebook displays it.

    Attributes:
        title: what it shows, such as "logit lens".
        about: of what, in a line: "31 layers, 12 tokens".
        drawn: the picture.
        table: gives its numbers, one column a name, all of one length.
    """

    title: str
    about: str
    drawn: Drawn = field(compare=False)
    table: Callable[[], Table] = field(compare=False)

    def __repr__(self) -> str:
        return f"View({self.title}: {self.about})"

    def _repr_html_(self) -> str:
        return fragment(self._content())

    def to_pandas(self) -> Any:
        """Its numbers as a pandas.DataFrame, one row a value.

        Raises:
            RequestError: pandas is not installed.
        """
        return data_frame(self.table())

    def save(self, path: str | Path) -> Path:
        """Write it to a file: a page (.html), or an image that browsers show (.svg).

        Returns:
            The path.

        Raises:
            RequestError: the name ends otherwise, or the file cannot be written.
        """
        file = Path(path)
        match file.suffix:
            case ".html":
                text = page(self.title, self._content())
            case ".svg":
                width = max(LEAST, self.drawn.width + MARGIN)
                lines = -(-len(self.about) * _CHARACTER // (width - MARGIN))
                height = _TITLE + _LINE * lines + self.drawn.height
                text = picture(self._content(), width, height)
            case _:
                raise RequestError(f"{file}: a view is a page or an image; end it in .html or .svg")
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{file}: cannot be written: {error.strerror}") from error
        return file

    def _content(self) -> str:
        title = f'<p class="title">{escape(self.title)}</p><p>{escape(self.about)}</p>'
        return title + self.drawn.markup
