"""Base class of `LLM` and `AsyncLLM`: tokenization, properties, statistics, notebook display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jinfer.api.prompt_inputs import Ids, Prompt
from jinfer.engine.engine_stats import Stats
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.template.chat_prompt import Message
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.api.activation_names import ActivationNames
    from jinfer.api.model_weights import ModelWeights
    from jinfer.api.pure_function import PureFunction
    from jinfer.api.session import Session
    from jinfer.engine.engine import Engine
    from jinfer.engine.output.completion import Usage


class BaseLLM:
    """An open model.

    Attributes:
        session: the session that runs it.
    """

    session: Session

    @property
    def _engine(self) -> Engine:
        return self.session.engine

    @property
    def spec(self) -> ModelSpec:
        """The resolved specification."""
        return self.session.opened.spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the checkpoint has none, and prompts are token ids."""
        return self.session.opened.tokenizer

    @property
    def weights(self) -> ModelWeights:
        """The weights by name: `llm.weights["decoder.3.attn.q"].values`."""
        return self.session.weights

    def names(self, pattern: str = "*") -> ActivationNames:
        """The values inside the model that can be captured and edited, with shapes and axes.

        They follow from the specification; nothing is computed (docs/activations.md).

        Args:
            pattern: `*` matches any text: "decoder.*.attn.q".

        Raises:
            RequestError: no name fits the pattern; the nearest one is named.
        """
        from jinfer.api.activation_tracing import names_of

        return names_of(self.session, pattern)

    def function(
        self, *, dequantize: bool = False, remat: bool = False
    ) -> tuple[PureFunction, dict[str, Any]]:
        """The model as a pure function in JAX, and its parameters by name.

            apply, params = llm.function()
            logits = jax.jit(apply)(params, tokens)
            x = apply.embed(params, tokens)
            jax.grad(lambda x: apply(params, tokens, embeddings=x)[-1, 42])(x)

        The function is of (params, tokens), without the engine, in operations that have derivatives
        (docs/functions.md); params are the engine's arrays, which stay as they are.

        Args:
            dequantize: quantized parameters as float32 arrays, which have derivatives; otherwise
                params have their codes, which are dequantized where they are multiplied.
            remat: a backward pass holds each layer's input alone and computes the layer again
                (rematerialization, gradient checkpointing): a third more time, for long texts.

        Raises:
            RequestError: the model is divided among devices, or closed.
        """
        from jinfer.api.pure_function import pure_function

        return pure_function(self.session, dequantize=dequantize, remat=remat)

    @property
    def context(self) -> int:
        """The context length: tokens that a sequence may have, prompt included."""
        return self.session.opened.context

    @property
    def load_seconds(self) -> float:
        """Seconds that loading the weights took."""
        return self.session.load_seconds

    @property
    def compile_seconds(self) -> float:
        """Seconds that requests have waited for compilation."""
        return self._engine.runner.programs.waited

    @property
    def compilations(self) -> int:
        """Programs compiled, or loaded from the persistent cache, so far."""
        return self._engine.runner.programs.compilations

    @property
    def last_usage(self) -> Usage:
        """Tokens and times of the request that ended last."""
        return self.session.thread.last_usage

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back, until `wake_up`."""
        return self.session.sleep_level > 0

    def stats(self) -> Stats:
        """The engine's current load, and its counters since the start."""
        return self.session.thread.stats()

    def encode(self, prompt: Prompt, *, special: bool | None = None) -> list[int]:
        """Tokenizes a text (with BOS where the model wants one) or a conversation; ids stay.

        Args:
            special: whether special tokens that are written in the prompt are recognized; None:
                in a text, but not in the messages of a conversation.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        return self.session.encode(prompt, special=special)

    def encode_chat(self, messages: str | Sequence[Message], **variables: Any) -> list[int]:
        """Tokenizes a conversation with the chat template (`jinfer.template.chat_template`).

        The prompt ends where the model answers.

        Args:
            messages: as `chat`.
            **variables: variables of the chat template; and `special`, as `encode`.
        """
        return self.session.encode_chat(messages, **variables)

    def decode(self, ids: Ids, *, skip_special: bool = True) -> str:
        """The text of token ids, with U+FFFD for incomplete characters.

        Args:
            skip_special: whether to leave out special tokens.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        return self.session.tokenizer.decode(self.session.encode(ids), skip_special=skip_special)

    def tokens(self, prompt: Prompt, *, special: bool | None = None) -> list[str]:
        """The tokens of a prompt as strings: ["The", " capital", " of"].

        A token that is not whole characters is written as in the vocabulary.

        Args:
            prompt, special: as `encode`.

        Raises:
            RequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        tokenizer = self.session.tokenizer
        return [tokenizer.token_text(id) for id in self.session.encode(prompt, special=special)]

    @property
    def can_chat(self) -> bool:
        """Whether the model has a tokenizer and a chat template."""
        return self.tokenizer is not None and self.session.opened.conversation.has_template

    def params(self, **changes: Any) -> SamplingParams:
        """The default sampling parameters, with changes. Raises `RequestError`."""
        return self.session.params(**changes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session.described()})"

    def _repr_html_(self) -> str:
        """The notebook display: the model's line, and folded below its wiring and sizes."""
        from jinfer.html.html_page import details_html

        title = "wiring and sizes"
        if self.spec.decoder is not None:
            title = f"{self.session.cache_report()}; {title}"
        return details_html(title, self.spec._repr_html_(), repr(self))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its weights and programs belong to this "
            "process; open the model in the other one"
        )
