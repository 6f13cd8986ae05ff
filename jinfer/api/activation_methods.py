"""The method of `LLM` that looks inside the model: traces of its values (activations)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinfer.api.base_llm import BaseLLM
from jinfer.api.prompt_inputs import Params, Prompt
from jinfer.sampling.activation_edits import Edit, Steer


class ActivationMethods(BaseLLM):
    """What `LLM` computes of activations."""

    generate: Any

    def trace(
        self,
        prompts: Prompt | Sequence[Prompt],
        capture: str | Sequence[str],
        *,
        edits: Edit | Sequence[Edit] = (),
        steer: Steer | Sequence[Steer] = (),
        max_tokens: int = 0,
        params: Params | None = None,
        encoder_ids: Prompt | Sequence[Prompt] | None = None,
        token_type_ids: Sequence[Sequence[int]] | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Values inside the model at every token: `llm.trace(text, "decoder.*.x")["decoder.3.x"]`.

        Prompts are computed by the engine, in chunks, with the weights that it has; only what is
        captured is computed beside what it needs.

        Args:
            prompts: texts, lists of token ids, or conversations; of an encoder-decoder, the
                decoder's.
            capture: names of values, as `names` lists them; `*` stands for any text.
            edits, steer: changes of values on the way, as of `SamplingParams`.
            max_tokens: length of an answer, whose tokens are traced too; 0: none.
            params: sampling parameters of the answer, as of `generate`.
            encoder_ids, token_type_ids: as `logits`.
            adapter: name of the LoRA adapter to compute with.

        Returns:
            A `Trace` of a single prompt, a list of them of several.

        Raises:
            RequestError: there is no such value, or memory for so many; the model is divided among
                devices; an invalid prompt.
        """
        from jinfer.api.activation_tracing import trace_prompts

        return trace_prompts(
            self.session,
            self.generate,
            prompts,
            capture,
            edits=edits,
            steer=steer,
            max_tokens=max_tokens,
            params=params,
            encoder_given=encoder_ids,
            token_type_ids=token_type_ids,
            adapter=adapter,
        )
