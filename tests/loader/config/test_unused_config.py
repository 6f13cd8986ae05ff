"""Keys of a config.json that nothing reads are listed; those that change answers are refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.inspect.inspect_checkpoint import main
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.loader.config.unused_config import consequences
from jinfer.loader.open_model import open_model
from jinfer.modelspec.spec_errors import SpecError, show_value
from tests.families.gguf_files import write_gguf
from tests.families.test_scaled_families import LATENT, latent_shapes
from tests.families.tiny import random_tensors, write
from tests.loader.resolving import resolved

GOLDENS = Path(__file__).parents[2] / "goldens"
NAMES = sorted(
    path.name
    for path in GOLDENS.iterdir()
    if (path / "config.json").exists() or (path / "model.gguf").exists()
)


def with_keys(folder: Path, **keys: Any) -> Path:
    """The golden llama2 with further keys."""
    shutil.copytree(GOLDENS / "llama2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def warned(source: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jinfer"):
        open_model(source, {"trust_config": "warn"})
    return [record.getMessage() for record in caplog.records if record.name == "jinfer"]


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("tok_", "real_", "vocab"))])
def test_what_is_served_as_it_says_is_not_refused(name: str, tmp_path: Path) -> None:
    """From the config.json of the hub, and from the one that transformers 5 writes."""
    forms = [GOLDENS / name]
    if (newer := GOLDENS / name / "config.v5.json").exists():
        for file in (GOLDENS / name).iterdir():
            if file.name != "config.json":
                (tmp_path / file.name).symlink_to(file)
        shutil.copyfile(newer, tmp_path / "config.json")
        forms.append(tmp_path)
    for form in forms:
        found = resolved(form, {})
        assert consequences(found.unread, found.config, found.spec) == {}


@pytest.mark.parametrize(
    ("keys", "how"),
    [
        ({"sliding_window": 32}, "attention reaches only so far back"),
        ({"logit_scale": 0.25}, "numbers are multiplied by it"),
        ({"final_logit_softcapping": 30.0}, "it bounds scores or logits"),
        ({"layer_norm_eps": 1e-3}, "the small number that norms add"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ({"rotary_emb_base": 500000}, "how fast rotary positions turn"),
        ({"activation_function": "relu"}, "the activation function"),
        ({"query_pre_attn_scalar": 7}, "scores are divided by its root"),
        ({"layer_types": ["sliding_attention", {}]}, "layers differ from each other"),
        ({"parallel_attn": True}, "attention and feed-forward stand side by side"),
        ({"clip_qkv": 8.0}, "queries, keys and values are clipped"),
        ({"query_pre_attn_scalar": 10**400}, "scores are divided by its root"),
        ({"rms_norm_epsilon": 3, "norm_eps": 10**400}, "the small number that norms add"),
    ],
)
def test_a_key_that_changes_answers_is_named(
    keys: dict[str, Any], how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_keys(tmp_path / "model", **keys)
    key, value = list(keys.items())[-1]
    line = f"{folder}: {key} = {show_value(value)} is not followed: {how}"
    assert line in warned(folder, caplog)
    with pytest.raises(SpecError, match=f": .* is not followed: {how}"):
        open_model(folder, {})
    assert keys.keys() <= resolved(folder, {}).unread.keys()


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 4096, "max_window_layers": 1},
        {"sliding_window": 32, "use_sliding_window": False},
        {"sliding_window": None},
        {"logit_scale": 1.0, "clip_qkv": None, "parallel_attn": False, "alibi": False},
        {"layer_norm_eps": 1e-5, "query_pre_attn_scalar": 16, "hidden_activation": "swish"},
        {"layer_types": ["full_attention"] * 3, "partial_rotary_factor": 1.0},
        {"position_embedding_type": "rope", "n_group": 1},
    ],
)
def test_a_value_that_changes_nothing_is_not(
    keys: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(with_keys(tmp_path / "model", **keys), caplog) == []


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({}, []),
        ({"scoring_func": "softmax"}, ["scoring_func"]),
        ({"topk_method": "greedy", "scoring_func": ["x"]}, ["scoring_func", "topk_method"]),
    ],
)
def test_how_a_family_chooses_experts(
    keys: dict[str, Any], wrong: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek-V3's way is the family's: a file that says it too is followed, another is not."""
    write(tmp_path, LATENT | keys, random_tensors(latent_shapes(), seed=1))
    lines = warned(tmp_path, caplog)
    assert sorted(line.split()[1] for line in lines) == wrong
    assert all(line.endswith("followed: how experts are chosen and weighed") for line in lines)


def test_a_key_of_gguf(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from jinfer.loader.checkpoint import open_checkpoint

    source = open_checkpoint(GOLDENS / "gguf_llama2")
    keys = {
        key.removeprefix("llama."): value
        for key, value in source.metadata.items()
        if key.startswith("llama.")
    }
    tensors = {name: tensor.read() for name, tensor in source.tensors.items()}
    keys |= {"vocab_size": 320, "attention.sliding_window": 16, "logit_scale": 1.0}
    write_gguf(tmp_path / "model.gguf", "llama", keys, tensors)
    (line,) = warned(tmp_path / "model.gguf", caplog)
    assert line.endswith("llama.attention.sliding_window = 16 is not followed: attention reaches "
                         "only so far back")  # fmt: skip


def test_keys_of_a_table_are_told_apart(tmp_path: Path) -> None:
    """That a table was read, as positions read theirs, does not mean all that is in it."""
    table = {"rope_theta": 10000.0, "rope_type": "default", "finetuned": True}
    folder = with_keys(tmp_path / "model", rope_theta=None, rope_parameters=table, other={"a": 1})
    left = resolved(folder, {}).unread
    assert left["rope_parameters.finetuned"] is True
    assert left["other"] == {"a": 1}
    read = {"rope_parameters", "rope_parameters.rope_theta", "rope_parameters.rope_type"}
    assert not read & left.keys()


def test_inspect_lists_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_keys(tmp_path / "model", logit_scale=0.25, odd=[1, 2])
    assert main([str(folder)]) == 0
    _, _, text = capsys.readouterr().out.partition("Keys that nothing read:\n")
    lines = text.splitlines()
    assert lines[0] == "  logit_scale = 0.25  # numbers are multiplied by it"
    assert lines[1] == "  odd = [1, 2]"
    assert lines[2].startswith("  of no consequence: ")
    assert lines[-1] == 'Refused for logit_scale; trust_config = "warn" goes on without.'
    found = describe(folder, {})
    assert all(key in text for key in found.unread)
    assert "torch_dtype" in found.unread
    assert not {"hidden_size", "architectures", "rms_norm_eps"} & found.unread.keys()
