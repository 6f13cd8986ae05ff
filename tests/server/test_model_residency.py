"""Who waits for which model, and which leaves: models whose loading a test holds up."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jinfer.engine.requests import RequestError
from jinfer.server.core.service import keep_alive_seconds
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models.model_manager import ModelManager
from jinfer.server.models.model_registry import ModelRegistry


class Fake:
    """A model that computes nothing."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __getattr__(self, what: str) -> Callable[..., Any]:
        return lambda *given: self.log.append(" ".join([what, self.name, *map(str, given)]))


class World:
    """A manager of models whose loading a test holds up.

    Attributes:
        log: what was done to models.
        gate: loading waits until it is set.
        broken: names of models that cannot be loaded.
    """

    def __init__(self, count: int, pinned: str = "", **settings: Any) -> None:
        self.log, self.gate, self.broken = list[str](), threading.Event(), set[str]()
        self.gate.set()
        sources = [
            ModelSource(name, name, on_demand=name not in pinned, pinned=name in pinned)
            for name in "abcd"[:count]
        ]
        chosen = ServerSettings(**{"warm_up": False, "max_loaded": 2, **settings})
        self.manager = ModelManager(ModelRegistry(tuple(sources)), chosen)

    def open(self, source: ModelSource, settings: Any) -> tuple[Fake, None]:
        self.log.append(f"open {source.name}")
        assert self.gate.wait(60)
        if source.name in self.broken:
            raise RequestError(f"{source.path}:\nis broken")
        return Fake(self.log, source.name), None

    def state(self, name: str) -> str:
        return self.manager.by_name(name).state

    async def asks(self, name: str, hold: asyncio.Event | None = None, **more: Any) -> str:
        """A request that uses a model until `hold` is set."""
        async with self.manager.use(name, **more) as item:
            self.log.append(f"use {item.name}")
            if hold is not None:
                await hold.wait()
            return item.name

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.005)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a coroutine function with a world of some models."""

    def run(scene: Callable[[World], Any], *given: Any, **settings: Any) -> World:
        async def whole() -> World:
            made = World(*given, **settings)
            for name in ("open_llm", "open_beside"):
                monkeypatch.setattr(f"jinfer.server.models.model_residency.{name}", made.open)
            monkeypatch.setattr(
                "jinfer.server.models.model_manager.examine", lambda source: ("", 0)
            )
            await made.manager.start()
            try:
                await asyncio.wait_for(scene(made), 60)
            finally:
                made.gate.set()
                await made.manager.close()
            return made

        return asyncio.run(whole())

    return run


def test_two_requests_load_a_model_once(world: Any) -> None:
    async def scene(w: World) -> None:
        w.gate.clear()
        first, second = asyncio.create_task(w.asks("a")), asyncio.create_task(w.asks("a"))
        await w.until(lambda: "open a" in w.log)
        assert w.state("a") == "loading"
        second.cancel()  # one that waits goes; the other has its model
        w.gate.set()
        assert await first == "a"
        assert second.cancelled()
        assert w.state("a") == "loaded"

    assert world(scene, 2).log[:2] == ["open a", "use a"]


def test_a_failed_load_is_reported_to_each_request(world: Any) -> None:
    async def scene(w: World) -> None:
        w.broken.add("a")
        found = await asyncio.gather(w.asks("a"), w.asks("a"), w.asks("b"), return_exceptions=True)
        for error in found[:2]:
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (503, "load_failed")
            assert error.message == "a could not be loaded: a: is broken"
        assert found[2] == "b"
        assert w.log.count("open a") == 1
        assert w.state("a") == "unloaded"
        w.broken.clear()  # the file was repaired
        assert await w.asks("a") == "a"

    world(scene, 2)


def test_the_least_recently_used_leaves(world: Any) -> None:
    async def scene(w: World) -> None:
        for name in "abac":
            await w.asks(name)
        assert [w.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]

    assert world(scene, 3).log[5:9] == ["stats b", "close b", "open c", "use c"]


def test_a_model_in_use_does_not_leave(world: Any) -> None:
    """Who waits has the place in the order of asking; who does not wait any more has none."""

    async def scene(w: World) -> None:
        hold = asyncio.Event()
        busy = asyncio.create_task(w.asks("a", hold))
        await w.until(lambda: "use a" in w.log)
        gone, *queued = [asyncio.create_task(w.asks(name)) for name in "bcd"]
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.sleep(0.02)
        assert w.state("a") == "loaded"
        hold.set()
        assert await asyncio.gather(busy, *queued) == ["a", "c", "d"]
        assert [w.state(name) for name in "abcd"] == ["unloaded"] * 3 + ["loaded"]

    log = world(scene, 4, max_loaded=1).log
    assert "open b" not in log
    assert [line for line in log if line.startswith("open")] == ["open a", "open c", "open d"]


def test_no_room_is_reported_after_model_wait(world: Any) -> None:
    async def scene(w: World) -> None:
        hold = asyncio.Event()
        busy = asyncio.create_task(w.asks("b", hold))
        await w.until(lambda: "use b" in w.log)
        with pytest.raises(ApiError, match="there is no room for c: 2 of --max-loaded 2") as error:
            await w.asks("c")
        assert (error.value.status, error.value.headers) == (503, {"retry-after": "7"})
        hold.set()
        await busy
        assert await w.asks("c") == "c"
        assert w.state("a") == "loaded"  # it is pinned

    world(scene, 3, "a", model_wait=0.05, retry_after=7)


def test_a_model_is_unloaded_when_its_requests_have_ended(world: Any) -> None:
    async def scene(w: World) -> None:
        item, hold = w.manager.by_name("a"), asyncio.Event()
        busy = asyncio.create_task(w.asks("a", hold))
        await w.until(lambda: "use a" in w.log)
        unload = asyncio.create_task(w.manager.unload(item))
        late = asyncio.create_task(w.asks("a"))
        await asyncio.sleep(0.02)
        assert (w.state("a"), item.users) == ("loaded", 1)
        unload.cancel()  # whoever asked for it has gone: nobody waits for it any more
        assert await late == "a"
        unload = asyncio.create_task(w.manager.unload(item))
        late = asyncio.create_task(w.asks("a"))
        await asyncio.sleep(0.02)
        hold.set()
        assert await asyncio.gather(busy, unload, late) == ["a", None, "a"]
        assert w.log.count("open a") == 2
        await w.manager.unload(item)
        assert w.state("a") == "unloaded"
        await w.manager.unload(item)  # nothing happens

    world(scene, 1)


def test_pinned_and_not_loaded(world: Any) -> None:
    async def scene(w: World) -> None:
        assert w.log == ["open a"]
        with pytest.raises(ApiError, match="a is pinned"):
            await w.manager.unload(w.manager.by_name("a"))
        with pytest.raises(ApiError, match=r"b is not loaded; .*POST /models/load"):
            await w.asks("b")
        await w.manager.load("b")
        assert await w.asks("b") == "b"

    world(scene, 2, "a", autoload=False)


def test_a_model_that_nobody_asks_sleeps_and_leaves(world: Any) -> None:
    async def scene(w: World) -> None:
        await w.asks("a", keep=1e9)
        await w.until(lambda: w.state("a") == "sleeping")
        await w.asks("a", keep=0.1)
        assert w.state("a") == "loaded"
        await w.until(lambda: w.state("a") == "unloaded")
        await w.asks("b", keep=0.0)
        await w.until(lambda: w.state("b") == "unloaded")
        await w.asks("b")
        await w.until(lambda: w.state("b") == "unloaded")
        await w.asks("b", keep=1e9)
        await w.until(lambda: w.state("b") == "sleeping")
        await asyncio.sleep(0.1)  # longer than others are kept
        assert w.state("b") == "sleeping"
        assert w.manager.is_dynamic

    log = world(scene, 2, idle_sleep=0.02, idle_unload=0.05).log
    order = [
        "open a",
        "use a",
        "sleep a 2",
        "wake_up a",
        "use a",
        "sleep a 2",
        "stats a",
        "close a",
    ]
    assert [line for line in log if line.endswith(("a", "a 2"))] == order


def test_a_sleeping_model_needs_room_to_wake(world: Any) -> None:
    async def scene(w: World) -> None:
        item = w.manager.by_name("a")
        with pytest.raises(ApiError, match="a is not loaded"):
            await w.manager.sleep(item, 1)
        await w.asks("a")
        await w.manager.sleep(item, 2)
        await w.asks("b")  # it has the place of the one that sleeps
        assert (w.state("a"), w.state("b")) == ("sleeping", "loaded")
        async with w.manager.peek("a") as seen:
            assert seen.state == "sleeping"
        await w.asks("a")
        assert (w.state("a"), w.state("b")) == ("loaded", "unloaded")
        await w.manager.sleep(item, 1)
        await w.asks("b")  # the weights of the one that sleeps are in memory: it leaves
        assert (w.state("a"), w.state("b")) == ("unloaded", "loaded")

    world(scene, 2, max_loaded=1)


DURATIONS: dict[Any, float] = {
    0: 0,
    -1: float("inf"),
    2.5: 2.5,
    "0": 0,
    "5m": 300,
    "1h30m": 5400,
    "90s": 90,
    "-1": float("inf"),
    "-1m": float("inf"),
    "250ms": 0.25,
    "1.5h": 5400.0,
}


@pytest.mark.parametrize(("given", "seconds"), DURATIONS.items())
def test_how_long_a_model_is_kept(given: Any, seconds: float) -> None:
    assert keep_alive_seconds(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "1e9", float("nan"), "5m?"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ApiError, match="is not a number of seconds") as error:
        keep_alive_seconds(given)
    assert error.value.param == "keep_alive"
