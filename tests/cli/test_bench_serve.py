"""The measurement of servers, against the service with a tiny model: what it counts is right."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.bench.bench_serve import (
    AnswerTimes,
    LatencyLimits,
    LengthMix,
    Workload,
    arrivals,
    conversation,
    figures,
    main,
    percentiles,
)
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.server.running import ROOT, Running, serving

SPEC = str(ROOT / "specs" / "smollm2_135m_instruct.toml")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = {"engine": {"context": 512, "slots": 4}}
    with serving(
        [ModelSource("smol", SPEC, engine)], ServerSettings(strict=True, warm_up=False)
    ) as running:
        yield running


COMMON = ("--users", "3", "--answer", "5", "--prompt", "4:1,9:2", "--extra", '{"ignore_eos": true}')


def test_a_closed_loop(running: Running, tmp_path: Path, capsys: Any) -> None:
    files = {"--svg": tmp_path / "a.svg", "--json": tmp_path / "a.json"}
    options = [str(part) for pair in files.items() for part in pair]
    limits = ("--first-limit", "60000", "--between-limit", "0.000001")
    more = ("--clients", "1,3", "--turns", "2", "--shared", "60", "--warm-up", "1", *limits)
    assert main([running.url, *COMMON, *more, *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "| 1 clients | 6 | 0 |" in printed.out
    assert "| 3 clients | 6 | 0 |" in printed.out
    one, three = json.loads(files["--json"].read_text())["loads"]
    for row in (one, three):
        assert row["answers"] == 6
        assert row["tokens"] * row["seconds"] == pytest.approx(6 * 5)
        assert row["good"] == 0  # no answer is that quick
        assert 0 < row["first"]["p50"] <= row["first"]["p99"] <= row["whole"]["p99"]
        assert row["between"]["p50"] > 0
        assert row["cached"] > 0.3  # the shared beginning, and all that was said before
    assert files["--svg"].read_text().startswith("<?xml")


def test_an_open_loop_of_texts(running: Running, capsys: Any) -> None:
    more = ("--rate", "40", "--text", "--warm-up", "0", "--first-limit", "60000")
    assert main([running.url + "/v1", *COMMON, *more]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| 40/s"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:3] == ["3", "0"]
    assert cells[3] == cells[4]  # all of them are good


def test_answers_that_fail(running: Running, capsys: Any) -> None:
    more = ("--clients", "2", "--model", "other", "--warm-up", "0")
    assert main([running.url, *COMMON, *more]) == 1
    printed = capsys.readouterr()
    assert "2 clients: 3 failed: 404: there is no model 'other'; there is: smol" in printed.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_no_server(url: str, capsys: Any) -> None:
    assert main([url]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {url}: cannot be reached: ")
    assert told.count("\n") == 1


def test_a_server_without_models(monkeypatch: Any, capsys: Any) -> None:
    import httpx

    async def nothing(self: Any, path: str) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr(httpx.AsyncClient, "get", nothing)
    assert main(["http://x"]) == 2
    assert capsys.readouterr().err == "error: http://x: lists no model; give --model NAME\n"


def test_figures_of_known_times() -> None:
    answers = [
        AnswerTimes(0.0, [1.0, 1.5, 2.0], tokens=3, prompt=10, cached=5),
        AnswerTimes(1.0, [1.25, 3.25, 5.0], tokens=11, prompt=30, cached=15),
        AnswerTimes(2.0, error="503: later"),
        AnswerTimes(2.5),
    ]
    found = figures("x", 2, answers, LatencyLimits(first=0.5, between=0.4))
    assert (found.answers, found.failed, found.seconds) == (2, 2, 5.0)
    assert (found.requests, found.tokens, found.prompts) == (0.4, 14 / 5, 8.0)
    assert (found.good, found.cached) == (0.2, 0.5)
    assert (found.first["p50"], found.first["p99"]) == (0.25, 1.0)
    assert (found.between["p50"], found.between["p95"]) == (0.375, 0.5)
    assert found.gap["p99"] == 2.0
    assert found.whole == {"p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0}
    assert found.errors == {"503: later": 1, "an empty answer": 1}
    assert figures("x", 1, [AnswerTimes(0.0)], LatencyLimits()).tokens == 0


def test_percentiles_are_values() -> None:
    assert percentiles([float(i) for i in range(1, 101)]) == {
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
    }
    assert set(percentiles([]).values()) == {0.0}


def test_mixes_and_conversations() -> None:
    mix = LengthMix.parse("32:3,512:1")
    drawn = [mix.draw(random.Random(i)) for i in range(2000)]
    assert 0.7 < drawn.count(32) / 2000 < 0.8
    for text in ("0", "x", "5:0", "5:-1", ""):
        with pytest.raises(ValueError, match=r"at least 1|invalid literal"):
            LengthMix.parse(text)
    work = Workload(LengthMix.parse("4"), mix, shared=7, turns=3)
    first, again, other = (conversation(work, number) for number in (0, 0, 1))
    assert first == again
    assert len(first) == 3
    begin = first[0].question.split("\n\n")[0]
    assert len(begin.split()) == 7
    assert other[0].question.startswith(begin)
    assert other != first
    assert len(first[1].question.split()) == 4


def test_arrivals_have_their_rate() -> None:
    times = arrivals(20.0, 4000, seed=1)
    assert list(times) == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)  # as of chance alone
