"""The thread that owns an engine and its device; everything else talks to it by queues.

Requests go in through one queue, pieces of answers come out through a sink that each brought along.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from jinfer.engine import fork_guard
from jinfer.engine.engine import Engine
from jinfer.engine.engine_stats import Stats
from jinfer.engine.output.generation import Generation, Usage
from jinfer.engine.requests import (
    ClosedError,
    DeadlineError,
    EngineError,
    Failed,
    Request,
    RequestError,
    Token,
)
from jinfer.engine.runner.compiled_programs import Shape
from jinfer.engine.runner.device_state import Choice
from jinfer.engine.runner.forward_passes import Passes, Pause
from jinfer.engine.scheduling.cache_size import trim
from jinfer.engine.search.search_driver import Driver
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher

type Job = Callable[[Engine], Any]  # gives its result, or a generator whose value that is
_CLOSED = "the model was closed; open it again"
_LOOK = 0.01  # seconds between two looks for a program that a job waits for
_LET_GO = 0.05  # seconds until XLA has let go of what a call was given, on a busy machine


class EngineThread:
    """Runs an engine on a thread of its own, which ends with `close`.

    Attributes:
        last_usage: tokens and seconds of the request that ended last.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.last_usage = Usage(0, 0, 0.0, 0.0)
        self._loop = _Loop(engine, tokenizer, weakref.ref(self))
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stop = weakref.finalize(self, self._loop.stop)

    def submit(
        self,
        request: Request,
        choice: Choice,
        sink: Callable[[Any], None],
        driver: Driver | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request.

        Args:
            sink: is called on the engine's thread with each `Chunk`, and last with the `Usage`, or
                with an exception that ends the request.
            driver, matcher: as `Engine.submit`.
        """
        self._send(lambda loop: loop.submit(request, choice, sink, driver, matcher))

    def cancel(self, request: int) -> None:
        """Ends a request within a step; its sink is not called again after that."""
        self._send(lambda loop: loop.end(request))

    def when_taken(self, told: Callable[[], None]) -> None:
        """Calls back once the engine has taken in, or refused, all that was submitted before.

        It is called on the engine's thread.
        """
        self._send(lambda loop: told())

    def progress(self, request: int) -> tuple[int, int] | None:
        """Tokens of a running request's prompt that were cached, and that are computed by now."""
        sequence = self._loop.engine.sequence(request)
        if sequence is None or sequence.cached is None:  # it waits for a slot
            return None
        return sequence.cached, sequence.computed

    def run(self, job: Job) -> Any:
        """The result of a job that is done between two steps; its exceptions are raised here.

        One that comes in pieces, `Passes`, lets a step run after each.
        """
        work = _Work(job)
        self._send(lambda loop: loop.jobs.append(work))
        return work.future.result()

    def stats(self) -> Stats:
        """What the engine does at the moment."""
        return self._loop.stats()

    def close(self) -> None:
        """Ends all requests, and the thread; the engine gives its memory back."""
        self._stop()
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def _send(self, message: Callable[[_Loop], Any]) -> None:
        fork_guard.check()
        if not self._stop.alive:
            raise ClosedError(_CLOSED)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._loop.run, name="jinfer-engine", daemon=True
                    )
                    self._loop.started = True
                    try:
                        thread.start()
                    except RuntimeError:  # it cannot be: nobody is to wait for it
                        self._loop.started = False
                        raise
                    self._thread = thread
                    _running.add(self)
                    _threads.add(self._thread)
        self._loop.send(message)


_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def close_all() -> None:
    """Ends all threads: one that still computes while the interpreter ends would crash it."""
    _exiting.set()
    for owner in list(_running):
        owner.close()
    for thread in list(_threads):  # also those whose owner was forgotten a moment ago
        if thread is not threading.current_thread():
            thread.join()


@dataclass
class _Work:
    """A job on its way; its passes, once it has begun, can be begun again."""

    job: Job
    future: Future[Any] = field(default_factory=Future)
    passes: Passes[Any] | None = None

    def advance(self, engine: Engine) -> Pause | None:
        """One piece of it; None: it is done, one way or the other."""
        try:
            if self.passes is None:
                result = self.job(engine)
                if not isinstance(result, Generator):
                    self.future.set_result(result)
                    return None
                self.passes = result
            return next(self.passes)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:
            self.future.set_exception(error)
        return None

    def forget(self) -> None:
        """What it holds is free, and it has to begin again."""
        if self.passes is not None:
            self.passes.close()
            self.passes = None

    def fail(self, error: RequestError) -> None:
        """Ends it."""
        self.forget()
        self.future.set_exception(error)


@dataclass
class _Loop:
    """What runs on the thread; knows its owner weakly, so that it ends when nobody else does."""

    engine: Engine
    tokenizer: Tokenizer | None
    owner: weakref.ref[EngineThread]
    inbox: SimpleQueue[Callable[[_Loop], Any] | None] = field(default_factory=SimpleQueue)
    # A finalizer may cancel a request while its thread sends something else.
    sending: threading.RLock = field(default_factory=threading.RLock)
    jobs: deque[_Work] = field(default_factory=deque)
    pause: Pause | None = None
    generations: dict[int, tuple[Generation, Callable[[Any], None]]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    started: bool = False
    worked: float = 0.0  # when it last did something

    def send(self, message: Callable[[_Loop], Any]) -> None:
        """Puts a message into the inbox, and ends the call that runs early for it."""
        with self.sending:
            self.inbox.put(message)
            self.engine.interrupt.set(True)

    def stop(self) -> None:
        """Ends the thread, whether or not it was ever needed; also when the owner is forgotten."""
        if self.started:
            self.inbox.put(None)
        else:
            self._let_go()

    def run(self) -> None:
        """Until there is a None in the inbox."""
        while self._receive():
            self._advance_jobs()
            if self.engine.busy:
                self._expire()
                self._step()
            self.worked = time.monotonic()
        # What came at the same time as the end has an answer too.
        while not self.inbox.empty():
            if (message := self.inbox.get()) is not None:
                message(self)
        for request in list(self.generations):
            self._fail(request, ClosedError("the model was closed while it answered"))
        for work in self.jobs:
            work.fail(ClosedError(_CLOSED))
        self.jobs.clear()
        self._let_go()

    def _let_go(self) -> None:
        """Lets the model go, and its memory with it."""
        self.engine.release()
        # XLA's threads hold what a call was given for a moment after its results are there.
        _exiting.wait(self.worked + _LET_GO - time.monotonic())
        # At any collection JAX lets go of what its threads have left, and of the host's arrays that
        # its own were made of. Cycles of a model's own hold next to nothing, and a search of all
        # objects would stop other models.
        gc.collect(0)
        trim()

    def _receive(self) -> bool:
        """Takes all messages; waits for one where there is nothing to do. False: the end."""
        idle = not self.engine.busy and (not self.jobs or isinstance(self.pause, Shape))
        while True:
            try:
                message = self.inbox.get(block=idle, timeout=_LOOK if self.jobs else None)
            except Empty:
                with self.sending:
                    if self.inbox.empty():
                        # What was taken does not interrupt what is launched for it.
                        self.engine.interrupt.set(False)
                        return True
                idle = False
                continue
            if message is None:
                return False
            message(self)
            idle = False

    def submit(
        self,
        request: Request,
        choice: Choice,
        sink: Callable[[Any], None],
        driver: Driver | None,
        matcher: Matcher | None,
    ) -> None:
        """Queues a request, or tells its sink why not."""
        try:
            self.engine.submit(request, choice, driver, matcher)
        except RequestError as error:
            sink(error)
            return
        self.generations[request.id] = Generation(request, self.tokenizer), sink

    def end(self, request: int) -> None:
        """Ends a request, done or not."""
        known = self.generations.pop(request, None)
        sequence = self.engine.finish(request)
        if known is None:
            return
        generation = known[0]
        generation.cached = (sequence and sequence.cached) or 0
        if sequence is not None:
            generation.admitted = sequence.admitted
            generation.drafted, generation.accepted = sequence.drafted, sequence.accepted
            generation.trees = sequence.trees
        self.prompt_tokens += len(generation.request.prompt)
        self.cached_tokens += generation.cached
        if (owner := self.owner()) is not None:
            owner.last_usage = generation.usage()

    def _fail(self, request: int, error: BaseException) -> None:
        sink = self.generations[request][1]
        self.end(request)
        sink(error)

    def _step(self) -> None:
        before = self.engine.programs.waited
        try:
            events = self.engine.step()
            if (waited := self.engine.programs.waited - before) > 0:
                for generation, _ in self.generations.values():
                    generation.waited += 0.0 if generation.count else waited
            for event in events:
                self._deliver(event)
        except Exception as error:  # whatever it is, the engine goes on with what waits
            self._recover(error)

    def _deliver(self, event: Token | Failed) -> None:
        if event.request not in self.generations:
            return  # of a request that ended with an earlier token of the same call
        if isinstance(event, Failed):
            self._fail(event.request, event.error)
            return
        generation, sink = self.generations[event.request]
        ended = generation.push(event)
        self.new_tokens += 1
        for chunk in generation.take():
            sink(chunk)
        if ended:
            self.end(event.request)
            sink(generation.usage())

    def _recover(self, error: Exception) -> None:
        for work in self.jobs:
            work.forget()
        failed = self.engine.recover() or list(self.generations)
        reason = error
        if not isinstance(error, EngineError):  # those say what to do
            reason = EngineError(f"a step failed: {type(error).__name__}: {error}")
            reason.__cause__ = error
        for request in failed:
            if request in self.generations:
                self._fail(request, reason)
            else:
                self.engine.finish(request)

    def _expire(self) -> None:
        for sequence in self.engine.scheduler.expired(time.monotonic()):
            self._fail(sequence.request.id, DeadlineError("the request's deadline has passed"))

    def _advance_jobs(self) -> None:
        """A job, or a piece of one, goes before each step; where it finds no room, it waits."""
        scheduler = self.engine.scheduler
        if not self.jobs:
            return
        alone = not scheduler.running
        self.pause = self.jobs[0].advance(self.engine)
        scheduler.hold = self.pause == "room" and not alone
        if self.pause == "room" and alone:
            self.jobs[0].fail(RequestError("the cache is too small for this; set engine.kv_tokens"))
            self.pause = None
        if self.pause is None:
            self.jobs.popleft()

    def stats(self) -> Stats:
        """What goes on; read from another thread, so that the figures may be a step apart."""
        scheduler = self.engine.scheduler
        pools = [*scheduler.blocks.pools.values()]
        counts = self.engine.drafted
        return Stats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            blocks=sum(pool.count for pool in pools),
            blocks_held=scheduler.blocks.held,
            preemptions=scheduler.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            new_tokens=self.new_tokens,
            compilations=self.engine.programs.compilations,
            drafts=counts.drafts,
            draft_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
        )
