"""What `LLM` and `AsyncLLM` share: texts and tokens, parameters, figures, how they look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jinfer.api.prompt_inputs import Ids, Prompt
from jinfer.engine.engine_stats import Stats
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.opening.chat_prompt import Message
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.api.session import Frontend
    from jinfer.engine.engine import Engine
    from jinfer.engine.output.generation import Usage


class Loaded:
    """A model that is open.

    Attributes:
        frontend: what runs it.
    """

    frontend: Frontend

    @property
    def _engine(self) -> Engine:
        return self.frontend.engine

    @property
    def spec(self) -> ModelSpec:
        """The resolved specification."""
        return self.frontend.opened.spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint has none; token ids are served all the same."""
        return self.frontend.opened.tokenizer

    @property
    def context(self) -> int:
        """Tokens that a sequence may have, prompt included."""
        return self.frontend.opened.context

    @property
    def load_seconds(self) -> float:
        """Time that the weights took."""
        return self.frontend.load_seconds

    @property
    def compile_seconds(self) -> float:
        """Time that requests have waited for programs to be compiled."""
        return self._engine.programs.waited

    @property
    def compilations(self) -> int:
        """Programs compiled, or taken from the persistent cache, so far."""
        return self._engine.programs.compilations

    @property
    def last_usage(self) -> Usage:
        """Tokens and seconds of the request that ended last."""
        return self.frontend.thread.last_usage

    def stats(self) -> Stats:
        """What the engine does at the moment, and what it has done so far."""
        return self.frontend.thread.stats()

    def encode(self, prompt: Prompt, *, special: bool | None = None) -> list[int]:
        """Token ids of a text (with BOS where the model wants one), of a conversation, or as given.

        Args:
            special: special tokens written in a text count as such; None: in a text they do, in
                the messages of a conversation they are text.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        return self.frontend.encode(prompt, special=special)

    def encode_chat(self, messages: str | Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            messages: as `chat`.
            **variables: for the chat template; and `special`.
        """
        return self.frontend.encode_chat(messages, **variables)

    def decode(self, ids: Ids, *, skip_special: bool = True) -> str:
        """The text of token ids, with U+FFFD for bytes that are no whole character.

        Args:
            skip_special: leave special tokens out; else they are spelled out.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        return self.frontend.tokenizer.decode(self.frontend.encode(ids), skip_special=skip_special)

    def tokens(self, prompt: Prompt, *, special: bool | None = None) -> list[str]:
        """Each token of a prompt as a text of its own: ["The", " capital", " of"].

        A token that is no whole character is written as in the vocabulary.

        Args:
            prompt, special: as `encode`.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        tokenizer = self.frontend.tokenizer
        return [tokenizer.shown(id) for id in self.frontend.encode(prompt, special=special)]

    @property
    def can_chat(self) -> bool:
        """Whether there is a tokenizer and a chat template."""
        return self.tokenizer is not None and self.frontend.opened.conversation.has_template

    def params(self, **changes: Any) -> SamplingParams:
        """The parameters of requests that name none, with changes. Raises `RequestError`."""
        return self.frontend.params(**changes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.frontend.described()})"

    def _repr_html_(self) -> str:
        """The model as a notebook shows it: what it is, and folded its wiring and sizes."""
        from jinfer.modelspec.view.model_html import folded

        title = "wiring and sizes"
        if self.spec.decoder is not None:
            title = f"{self.frontend.cache_report()}; {title}"
        return folded(repr(self), title, self.spec._repr_html_())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its weights and programs belong to this "
            "process; open the model in the other one"
        )
