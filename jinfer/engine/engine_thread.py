"""Engine thread: the one thread that uses an engine and its device.

Other threads send it messages through a queue. Chunks of an answer go to the sink, a callback, that
its request was submitted with.
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

from jinfer.engine.engine import Engine
from jinfer.engine.engine_stats import Stats
from jinfer.engine.output.completion import Usage
from jinfer.engine.output.generation import Generation
from jinfer.engine.requests import (
    ClosedError,
    DeadlineError,
    EngineError,
    Failed,
    Request,
    RequestError,
    Token,
)
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.runner.forward_passes import Passes, Pause
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.cache_size import trim
from jinfer.engine.search.search_driver import SearchDriver
from jinfer.engine.thread_pools import check_not_forked
from jinfer.startup import at_usual_priority
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher

type EngineJob = Callable[[Engine], Any]  # returns its result, or a generator that does


@dataclass
class QueuedJob:
    """A queued job; once begun, its passes can restart.

    Attributes:
        abandoned: nobody waits for its result; it ends at its next part.
    """

    job: EngineJob
    future: Future[Any] = field(default_factory=Future)
    passes: Passes[Any] | None = None
    abandoned: bool = False

    def advance(self, engine: Engine) -> Pause | None:
        """Runs its next part; None once it has a result or an exception, or is abandoned."""
        if self.abandoned:
            self.restart()
            return None
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

    def restart(self) -> None:
        """Frees what its passes hold; it begins again."""
        if self.passes is not None:
            self.passes.close()
            self.passes = None

    def fail(self, error: RequestError) -> None:
        """Ends it with an error."""
        self.restart()
        self.future.set_exception(error)


_CLOSED = "the model was closed; open it again"
_POLL = 0.01  # polling interval in seconds while a job waits for a program
_RELEASE_WAIT = 0.05  # seconds until XLA has released a call's arguments, on a busy machine


class EngineThread:
    """Runs an engine on its own thread, which ends with `close`.

    Attributes:
        last_usage: usage of the request that ended last.
        refusal: why no requests are taken; "": they are.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.last_usage = Usage(0, 0, 0.0, 0.0)
        self.refusal = ""
        self._loop = _EngineLoop(engine, tokenizer, weakref.ref(self))
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stop = weakref.finalize(self, self._loop.stop)

    def submit(
        self,
        request: Request,
        choice: SamplingRow,
        sink: Callable[[Any], None],
        driver: SearchDriver | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request.

        Args:
            choice: sampling parameters and the sampler's initial state.
            sink: called on the engine's thread with each `Chunk`, and last with the `Usage` or
                with the exception that ends the request.
            driver, matcher: as `Engine.submit`.

        Raises:
            RequestError: no requests are taken.
        """
        self._check_taken()
        self._send(lambda loop: loop.submit(request, choice, sink, driver, matcher))

    def cancel(self, request: int) -> None:
        """Ends a request within one step; its sink is not called afterwards."""
        if self._stop.alive:  # a closed model has ended all requests
            self._send(lambda loop: loop.end(request))

    def when_received(self, callback: Callable[[], None]) -> None:
        """Calls back, on the engine's thread, once earlier submissions are queued or refused."""
        self._send(lambda loop: callback())

    def progress(self, request: int) -> tuple[int, int] | None:
        """(cached, computed) tokens of a running request's prompt; None before it has a slot."""
        sequence = self._loop.engine.sequence(request)
        if sequence is None or sequence.cached is None:
            return None
        return sequence.cached, sequence.computed

    def run(self, job: EngineJob, *, always: bool = False) -> Any:
        """Runs a job between two steps and returns its result; its exceptions are raised here.

        If the job returns a generator, `Passes`, a step runs after each of its parts. Ctrl-C ends
        it after the part that runs.

        Args:
            always: also while no requests are taken.
        """
        if not always:
            self._check_taken()
        work = QueuedJob(job)
        try:
            self._send(lambda loop: loop.jobs.append(work))
            return work.future.result()
        except KeyboardInterrupt:
            work.abandoned = not always
            raise

    def _check_taken(self) -> None:
        if self.refusal:
            raise RequestError(self.refusal)

    def stats(self) -> Stats:
        """Engine statistics."""
        return self._loop.stats()

    def close(self) -> None:
        """Ends all requests and the thread, and frees the engine's memory."""
        self._stop()
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def start(self) -> None:
        """Starts the thread, unless it runs: it cannot start once the main thread has returned."""
        with self._starting:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._loop.run, name="jinfer-engine", daemon=True)
            self._loop.started = True
            try:
                at_usual_priority(thread.start)
            except RuntimeError:  # `stop` must not wait for a thread that cannot start
                self._loop.started = False
                raise
            self._thread = thread
            _running.add(self)
            _threads.add(self._thread)

    def _send(self, message: Callable[[_EngineLoop], Any]) -> None:
        check_not_forked()
        if not self._stop.alive:
            if _exiting.is_set() and threading.current_thread().daemon:
                threading.Event().wait()  # it ends with the interpreter, without a traceback
            raise ClosedError(_CLOSED)
        if self._thread is None:
            self.start()
        self._loop.send(message)


_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def close_all() -> None:
    """Closes all engines: a thread that computes while the interpreter exits would crash it."""
    _exiting.set()
    for owner in list(_running):
        owner.close()
    for thread in list(_threads):  # also those whose owner was just collected
        if thread is not threading.current_thread():
            thread.join()


@dataclass
class _EngineLoop:
    """The thread's loop; a weak reference to its owner, so that dropping the owner ends it."""

    engine: Engine
    tokenizer: Tokenizer | None
    owner: weakref.ref[EngineThread]
    inbox: SimpleQueue[Callable[[_EngineLoop], Any] | None] = field(default_factory=SimpleQueue)
    # A finalizer may cancel a request while its thread sends something else.
    sending: threading.RLock = field(default_factory=threading.RLock)
    jobs: deque[QueuedJob] = field(default_factory=deque)
    pause: Pause | None = None
    generations: dict[int, tuple[Generation, Callable[[Any], None]]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    started: bool = False
    worked: float = 0.0  # time of the last work, in seconds of `time.monotonic`

    def send(self, message: Callable[[_EngineLoop], Any]) -> None:
        """Puts a message into the inbox, and interrupts the running call."""
        with self.sending:
            self.inbox.put(message)
            self.engine.interrupt.set(True)

    def stop(self) -> None:
        """Ends the thread, if it was started; also called when the owner is collected."""
        if self.started:
            self.inbox.put(None)
        else:
            self._release()

    def run(self) -> None:
        """Runs until there is a None in the inbox."""
        while self._receive():
            self._advance_jobs()
            if self.engine.busy:
                self._expire()
                self._step()
            self.worked = time.monotonic()
        # Messages that arrived together with the end are answered too.
        while not self.inbox.empty():
            if (message := self.inbox.get()) is not None:
                message(self)
        if not _exiting.is_set():  # only daemon threads wait then, and end with the interpreter
            for request in list(self.generations):
                self._fail(request, ClosedError("the model was closed while it answered"))
            for work in self.jobs:
                work.fail(ClosedError(_CLOSED))
        self.jobs.clear()
        self._release()

    def _release(self) -> None:
        """Frees the model and its memory."""
        self.engine.release()
        # XLA's threads hold a call's arguments for a moment after its results are ready.
        _exiting.wait(self.worked + _RELEASE_WAIT - time.monotonic())
        # In any collection JAX drops what its threads have left, and the NumPy arrays that its
        # arrays were made from. Generation 0 is enough: a model's own cycles are small, and a full
        # collection would stall other models.
        gc.collect(0)
        trim()

    def _receive(self) -> bool:
        """Handles all messages; waits for one if the engine is idle. False: the loop ends."""
        idle = not self.engine.busy and (not self.jobs or isinstance(self.pause, StepKey))
        while True:
            try:
                message = self.inbox.get(block=idle, timeout=_POLL if self.jobs else None)
            except Empty:
                with self.sending:
                    if self.inbox.empty():
                        # Handled messages must not interrupt the calls launched for them.
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
        choice: SamplingRow,
        sink: Callable[[Any], None],
        driver: SearchDriver | None,
        matcher: Matcher | None,
    ) -> None:
        """Queues a request, or gives its sink the error."""
        try:
            self.engine.submit(request, choice, driver, matcher)
        except RequestError as error:
            sink(error)
            return
        self.generations[request.id] = Generation(request, self.tokenizer), sink

    def end(self, request: int) -> Usage | None:
        """Ends a request, finished or not; None if it has ended before."""
        known = self.generations.pop(request, None)
        sequence = self.engine.finish(request)
        if known is None:
            return None
        usage = known[0].usage(sequence)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        if (owner := self.owner()) is not None:
            owner.last_usage = usage
        return usage

    def _fail(self, request: int, error: BaseException) -> None:
        sink = self.generations[request][1]
        self.end(request)
        sink(error)

    def _step(self) -> None:
        before = self.engine.runner.programs.waited
        try:
            events = self.engine.step()
            if (waited := self.engine.runner.programs.waited - before) > 0:
                for generation, _ in self.generations.values():
                    generation.waited += 0.0 if generation.count else waited
            for event in events:
                self._deliver(event)
        except Exception as error:  # the engine goes on with other requests
            self._recover(error)

    def _deliver(self, event: Token | Failed) -> None:
        if event.request not in self.generations:
            return  # the request ended with an earlier token of the same call
        if isinstance(event, Failed):
            self._fail(event.request, event.error)
            return
        generation, sink = self.generations[event.request]
        ended = generation.push(event)
        self.new_tokens += 1
        for chunk in generation.take():
            sink(chunk)
        if ended:
            sink(self.end(event.request))

    def _recover(self, error: Exception) -> None:
        for work in self.jobs:
            work.restart()
        failed = self.engine.recover() or list(self.generations)
        reason = error
        if not isinstance(error, EngineError):  # its message says what to do
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
        """Runs a job, or a part of one, before each step; it waits if it finds no free blocks."""
        scheduler = self.engine.scheduler
        if not self.jobs:
            return
        alone = not scheduler.running
        self.pause = self.jobs[0].advance(self.engine)
        scheduler.admission_paused = self.pause == "room" and not alone
        if self.pause == "room" and alone:
            self.jobs[0].fail(RequestError("the cache is too small for this; set engine.kv_tokens"))
            self.pause = None
        if self.pause is None:
            self.jobs.popleft()

    def stats(self) -> Stats:
        """Engine statistics; read from another thread, so that figures may be a step apart."""
        scheduler = self.engine.scheduler
        pools = [*scheduler.blocks.pools.values()]
        counts = self.engine.drafted
        return Stats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            blocks=sum(pool.count for pool in pools),
            blocks_held=scheduler.blocks.used,
            preemptions=scheduler.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            new_tokens=self.new_tokens,
            compilations=self.engine.runner.programs.compilations,
            drafts=counts.drafts,
            draft_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            **({} if (offload := self.engine.offload) is None else offload.stats()),
        )
