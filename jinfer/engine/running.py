"""Requests on their way: several generations that advance together on one engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jinfer.engine.beam import beam_search
from jinfer.engine.engine import Engine
from jinfer.engine.generation import Chunk, Completion, Generation, RequestError, Usage, completion
from jinfer.engine.requests import Request, Token
from jinfer.tokenizer import Tokenizer


@dataclass
class Running:
    """The requests that an engine runs.

    Attributes:
        engine: what runs them.
        tokenizer: turns their tokens into text, where there is one.
        last_usage: tokens and seconds of the request that ended last.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    last_usage: Usage = field(default_factory=lambda: Usage(0, 0, 0.0, 0.0))
    _generations: dict[int, Generation] = field(default_factory=dict)

    def submit(self, request: Request) -> Generation:
        """Queues a request."""
        generation = Generation(request, self.tokenizer)
        self._generations[request.id] = generation
        self.engine.submit(request)
        return generation

    def chunks(self, generation: Generation) -> Iterator[Chunk]:
        """A generation's pieces as they come; the others advance with it."""
        while True:
            # While a piece is out, other streams may have advanced this one to its end.
            while pieces := generation.take():
                yield from pieces
            if generation.ended:
                return
            if not self.engine.busy:
                raise RequestError(
                    "the request was lost when another one was interrupted; repeat it"
                )
            self._step()

    def _step(self) -> None:
        before = self.engine.programs.waited
        tokens = self.engine.step()
        for generation in self._generations.values():
            if not generation.count:
                generation.waited += self.engine.programs.waited - before
        for token in tokens:
            generation = self._generations[token.request]
            # Two tokens may come at once, the second after the end.
            if not generation.ended and generation.push(token):
                self.engine.finish(token.request)

    def abandon(self, generations: Sequence[Generation]) -> None:
        """Ends requests, done or not."""
        for generation in generations:
            self.last_usage = generation.usage()
            self.engine.finish(generation.request.id)
            self._generations.pop(generation.request.id, None)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their end, together but for beam searches."""
        together = {r.id: self.submit(r) for r in requests if r.sampling.strategy != "beam"}
        try:
            return [
                completion(together[request.id], list(self.chunks(together[request.id])))
                if request.id in together
                else self._search(request)
                for request in requests
            ]
        finally:
            self.abandon(list(together.values()))

    def _search(self, request: Request) -> Completion:
        generation = Generation(request, self.tokenizer)
        for id in beam_search(self.engine, request).tokens:
            if not generation.ended:
                generation.push(Token(request.id, id))
        generation.finish_reason = generation.finish_reason or "length"
        self.last_usage = generation.usage()
        return completion(generation, generation.take())
