"""generation_config.json: defaults of a checkpoint, below the specification's and a request's."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.config import generation_config
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.open_model import Opened, open_model
from jinfer.modelspec.spec_errors import SpecError

GOLDENS = Path(__file__).parents[2] / "goldens"
DRAWING: dict[str, Any] = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 77,
}  # fmt: skip


def with_file(folder: Path, name: str = "llama2", **said: Any) -> Path:
    """A copy of a golden with a generation_config.json."""
    shutil.copytree(GOLDENS / name, folder)
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def opened(folder: Path, said: dict[str, Any], **overrides: Any) -> Opened:
    return open_model(with_file(folder / "model", **said), overrides)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {}),
        (DRAWING, {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_tokens": 77}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": -1, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        # Without do_sample a file is greedy, whatever else it says.
        (DRAWING | {"do_sample": False}, {"max_tokens": 77}),
        ({"temperature": 0.6, "top_p": None}, {}),
        ({"max_new_tokens": None, "num_beams": 4, "transformers_version": "4.40.0"}, {}),
    ],
)
def test_what_a_file_says(said: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    assert opened(tmp_path, said).defaults == wanted


def test_the_specification_wins_and_the_request_over_both(tmp_path: Path) -> None:
    folder = with_file(tmp_path / "model", **DRAWING)
    over: dict[str, Any] = {"generation.top_p": 0.5, "generation.max_tokens": 3}
    llm = LLM(folder, dtype="float32", **over)
    assert llm.params() == SamplingParams(temperature=0.6, top_p=0.5, top_k=40, max_tokens=3)
    assert llm.params(temperature=0, top_k=7).top_k == 7
    assert llm.params(temperature=0).drawing_temperature == 0
    assert llm.params(strategy="greedy").drawing_temperature == 0
    ids = [5, 9, 2, 40]
    (answer,) = llm.generate(ids, llm.params(ignore_eos=True))
    assert len(answer.token_ids) == 3
    plain = LLM(GOLDENS / "llama2", dtype="float32")
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    assert llm.generate(ids, greedy)[0].token_ids == plain.generate(ids, greedy)[0].token_ids


def test_none_of_them(tmp_path: Path) -> None:
    over = {"generation.defaults": "none", "generation.min_p": 0.2}
    assert opened(tmp_path, DRAWING, **over).defaults == {"min_p": 0.2}
    with pytest.raises(SpecError, match=r"generation.defaults: 'no' is not known; allowed: check"):
        open_model(GOLDENS / "llama2", {"generation.defaults": "no"})


@pytest.mark.parametrize(
    ("eos", "wanted"), [(7, (7,)), ([7, 9], (7, 9)), (None, (2,)), (True, (2,)), ("x", (2,))]
)
def test_ends_of_sequence(eos: Any, wanted: tuple[int, ...], tmp_path: Path) -> None:
    """Without a tokenizer, config.json's where the file says none; llama2's is 2."""
    assert opened(tmp_path, {"eos_token_id": eos}).end_ids == wanted


def test_ends_of_config_beside_a_tokenizers(tmp_path: Path) -> None:
    """A list in config.json counts where no generation_config.json speaks, without its nonsense."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama2", folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [2, 5, config["vocab_size"]]
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(GOLDENS / "tok_spm_bpe" / file, folder)
    found = open_model(folder, {})
    assert found.tokenizer is not None
    assert found.end_ids == (2, 5)


def test_an_end_of_sequence_ends_an_answer(tmp_path: Path) -> None:
    ids, greedy = [5, 9, 2, 40], SamplingParams(max_tokens=6)
    tokens = LLM(GOLDENS / "llama2", dtype="float32").generate(ids, greedy)[0].token_ids
    folder = with_file(tmp_path / "model", eos_token_id=[tokens[2], 319])
    (answer,) = LLM(folder, dtype="float32").generate(ids, greedy)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[:2] == tokens[:2]


def test_what_an_answer_of_an_encoder_decoder_starts_from(tmp_path: Path) -> None:
    said = {"decoder_start_token_id": 5, "forced_bos_token_id": 6}
    folder = with_file(tmp_path / "model", "bart", **said)
    assert open_model(folder, {}).decoder_prefix == (5, 6)
    assert open_model(GOLDENS / "bart", {}).decoder_prefix[0] == 2


def test_only_parameters_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Few:
        temperature: float | None = None
        repetition_penalty: float = 1.0
        bad_words_ids: Any = ()
        banned_token_ids: Any = ()

    monkeypatch.setattr(generation_config, "SamplingParams", Few)
    said = DRAWING | {
        "repetition_penalty": 1.2, "bad_words_ids": [[3, 4]], "suppress_tokens": [1],
    }  # fmt: skip
    assert generation_config.generation_defaults({}, said, tmp_path, "here") == {
        "temperature": 0.6, "repetition_penalty": 1.2, "bad_words_ids": [[3, 4]],
        "banned_token_ids": [1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {"do_sample": True, "temperature": "hot"},
            "temperature: temperature must be a number",
        ),
        ({"do_sample": True, "top_p": -1}, "top_p: top_p must be a number from 0 to 1"),
        ({"max_new_tokens": 0.5}, "max_new_tokens: max_tokens must be a whole number"),
    ],
)
def test_values_that_cannot_be(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, said)
    file = tmp_path / "model" / "generation_config.json"
    assert str(caught.value).startswith(f"{file}: {reason}")
    assert str(caught.value).endswith('mend it, or set generation.defaults = "none"')
    assert open_model(tmp_path / "model", {"generation.defaults": "none"}).defaults == {}


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_file_that_is_none(text: str, tmp_path: Path) -> None:
    folder = with_file(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(SourceError, match=r"generation_config.json: (is not a JSON|cannot be rea)"):
        open_model(folder, {})


def gguf_saying(path: Path, **said: Any) -> Path:
    """A golden GGUF with sampling parameters as llama.cpp writes them."""
    source = open_checkpoint(GOLDENS / "gguf_llama2")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in source.metadata.items():
        if key.startswith("llama."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    kinds: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_int32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in said.items():
        kinds[type(value)](f"general.sampling.{key}", value)
    for name, tensor in source.tensors.items():
        writer.add_tensor(name, np.asarray(tensor.read(), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "xtc_probability": 0.5},
            {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "xtc_probability": 0.5},
        ),
        ({"temp": -1.0, "top_k": -7}, {"temperature": 0, "top_k": 0}),
        ({"top_k": -1}, {}),
        ({"penalty_repeat": 1.5}, {"repetition_penalty": 1.5, "penalty_last_n": 64}),
        (
            {"penalty_repeat": 1.5, "penalty_last_n": -1},
            {"repetition_penalty": 1.5, "penalty_last_n": -1},
        ),
        ({"penalty_repeat": 1.0}, {"repetition_penalty": 1.0}),
        ({"sequence": "top_k;typ_p;temperature"}, {"samplers": ("top_k", "typ_p", "temperature")}),
        (
            {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.25},
            {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.25},
        ),
    ],
)
def test_what_a_gguf_says(said: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    file = gguf_saying(tmp_path / "model.gguf", **said)
    assert open_model(file, {}).defaults == wanted
    assert open_model(file, {"generation.defaults": "none"}).defaults == {}
    over = {"generation.top_k": 3}
    assert open_model(file, over).defaults == {**wanted, "top_k": 3}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"temp": "hot"}, "general.sampling.temp: temperature must be a number from 0"),
        ({"temp": float("nan")}, "general.sampling.temp: temperature must be a number from 0"),
        ({"sequence": "top_k;infill"}, "general.sampling.sequence: samplers must be some of"),
        ({"sequence": 3}, "general.sampling.sequence: samplers must be a list, not 3"),
        ({"top_k": "3"}, "general.sampling.top_k: top_k must be"),
    ],
)
def test_what_a_gguf_cannot_say(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file = gguf_saying(tmp_path / "model.gguf", **said)
    with pytest.raises(SourceError) as caught:
        open_model(file, {})
    assert str(caught.value).startswith(f"{file}: {reason}")
    assert str(caught.value).endswith('mend it, or set generation.defaults = "none"')


def test_a_gguf_has_no_file_and_a_converted_checkpoint_says_what_its_source_did(
    tmp_path: Path,
) -> None:
    convert(str(gguf_saying(tmp_path / "model.gguf", temp=0.5)), tmp_path / "of_gguf", {})
    assert open_model(tmp_path / "of_gguf", {}).defaults == {"temperature": 0.5}
    assert open_model(with_file(tmp_path / "gguf", "gguf_llama2", **DRAWING), {}).defaults == {}
    convert(str(with_file(tmp_path / "source", **DRAWING)), tmp_path / "out", {})
    assert open_model(tmp_path / "out", {}).defaults["temperature"] == 0.6
