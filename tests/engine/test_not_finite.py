"""Steps whose logits are NaN or infinite: the request fails, and others keep their bits."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM, AsyncLLM, NotFiniteError, SamplingParams
from jinfer.generate import main
from tests.engine.tiny import GOLDEN

SLOTS: dict[str, Any] = {"engine.slots": 4}
BAD = 7  # a token whose embedding has a NaN
GOOD = [[3, 9, 40], [5, 6, 80, 81, 100], [11]]
WRONG = [3, 9, BAD, 12]
NEVER = {BAD: -float("inf")}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(
    max_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4, logit_bias=NEVER
)
EMBED = "model.embed_tokens.weight"


def broken(folder: Path, value: float = float("nan")) -> Path:
    """The golden with an own head, and a number that is not finite in the row of one token."""
    shutil.copytree(GOLDEN, folder)
    tensors = load_file(folder / "model.safetensors")
    embed = tensors[EMBED].copy()
    tensors.setdefault("lm_head.weight", embed.copy())
    embed[BAD, 3] = value
    tensors[EMBED] = embed
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return broken(tmp_path_factory.mktemp("broken") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", **SLOTS) as llm:
        yield llm


def events(llm: LLM, prompt: list[int], sampling: SamplingParams) -> list[Any]:
    """What a stream gives, its error last."""
    found: list[Any] = []
    try:
        found.extend(llm.stream(prompt, sampling))
    except NotFiniteError as error:
        found.append(error)
    return found


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_generate_stream_and_score_fail(llm: LLM, sampling: SamplingParams) -> None:
    for call in (
        lambda: llm.generate([WRONG], sampling),
        lambda: list(llm.stream(WRONG, sampling)),
    ):
        with pytest.raises(NotFiniteError, match="the logits are NaN or infinite: see what"):
            call()
    with pytest.raises(NotFiniteError):
        llm.score([WRONG])
    assert not llm._engine.busy


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_others_in_the_batch_keep_their_bits(folder: Path, sampling: SamplingParams) -> None:
    async def together() -> list[Any]:
        async with AsyncLLM(folder, dtype="float32", **SLOTS) as llm:
            prompts = [GOOD[0], WRONG, GOOD[1], WRONG, GOOD[2], GOOD[1]]
            tasks = [llm.generate([prompt], sampling) for prompt in prompts]
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, bad, second, other, third, again = asyncio.run(together())
    assert isinstance(bad, NotFiniteError)
    assert isinstance(other, NotFiniteError)
    with LLM(folder, dtype="float32", **SLOTS) as llm:
        for (one,), prompt in (
            (first, GOOD[0]),
            (second, GOOD[1]),
            (third, GOOD[2]),
            (again, GOOD[1]),
        ):
            (alone,) = llm.generate([prompt], sampling)
            assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs)


def test_an_answer_fails_at_the_token_that_is_wrong(llm: LLM) -> None:
    """Tokens before it were given; forced by a bias, the bad token comes second."""
    biased = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={BAD: 100.0})
    *chunks, error = events(llm, GOOD[0], biased)
    assert [id for chunk in chunks for id in chunk.token_ids] == [BAD]
    assert isinstance(error, NotFiniteError)
    with pytest.raises(NotFiniteError):
        llm.generate([GOOD[0], GOOD[1]], biased)


@pytest.mark.parametrize(
    "extra",
    [
        {"strategy": "beam", "beams": 2},
        {"strategy": "contrastive", "top_k": 3, "penalty_alpha": 0.5},
    ],
    ids=["beam", "contrastive"],
)
def test_searches_fail(llm: LLM, extra: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, **extra)
    with pytest.raises(NotFiniteError):
        llm.generate([WRONG], sampling)
    assert len(llm.generate([GOOD[0]], sampling)[0].token_ids) == 4


def test_processors_do_not_hide_the_model(llm: LLM) -> None:
    with pytest.raises(NotFiniteError):
        llm.generate(
            [WRONG], GREEDY, logits_processors=[lambda logits, tokens, lengths: logits + 1]
        )


def test_infinity_in_logits_fails(tmp_path: Path) -> None:
    model = LLM(broken(tmp_path / "model", np.inf), dtype="float32")
    with model as llm, pytest.raises(NotFiniteError):
        llm.generate([WRONG], GREEDY)


def test_embeddings_fail(folder: Path) -> None:
    with LLM(folder, dtype="float32") as llm:
        with pytest.raises(NotFiniteError, match="the vectors are NaN"):
            llm.embed([GOOD[0], WRONG], pooling="mean")
        assert np.isfinite(llm.embed(GOOD, pooling="mean")).all()


def test_with_drafts(folder: Path) -> None:
    """A verified tree in whose rows NaN comes ends the request after the tokens before."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    drafts: dict[str, Any] = {"speculation.draft": "ngram", "speculation.nodes": 8}
    with LLM(folder, dtype="float32", **drafts) as llm:
        with pytest.raises(NotFiniteError):
            llm.generate([[3, 9, 12] * 6 + [BAD]], sampling)
        (drafted,) = llm.generate([[3, 9, 12] * 6], sampling)
    with LLM(folder, dtype="float32") as llm:
        assert llm.generate([[3, 9, 12] * 6], sampling)[0].token_ids == drafted.token_ids


def test_the_command_says_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = " ".join(map(str, WRONG))
    assert main([str(folder), "--ids", ids, "--max-tokens", "4"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: the logits are NaN or infinite: see what loading says")
