"""The flags: one for each sampling parameter, and none that contradicts another or does nothing."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.terminal.argument_parser import spelled
from jinfer.cli.terminal.flag_conflicts import FlagError, check, check_effects, merge_alternatives
from jinfer.cli.terminal.generate_flags import make_parser, sampling
from jinfer.generate import main
from jinfer.sampling.sampling_params import ACTIVATIONS, SamplingParams

ROOT = Path(__file__).parents[2]
SPEC = str(ROOT / "specs" / "smollm2_135m_instruct.toml")
LLAMA2 = str(ROOT / "tests" / "goldens" / "llama2")


def parsed(*arguments: str) -> argparse.Namespace:
    return make_parser("test").parse_args(arguments)


def test_every_parameter_has_a_flag_with_a_help_text() -> None:
    help = " ".join(make_parser("test").format_help().split())
    for field in fields(SamplingParams):
        has_flag = field.name not in (*ACTIVATIONS, "logits_processors")
        assert (f"{spelled(field.name)} " in help) == has_flag
    assert "the k likeliest tokens; 0: all " in help
    assert "see --beams" in help


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--greedy"], {"strategy": "greedy"}),
        (["--strategy", "beam", "--beams", "3"], {"strategy": "beam", "beams": 3}),
        (["--top-k", "5", "--top-p", "0.5"], {"top_k": 5, "top_p": 0.5}),
        (["-n", "3", "--seed", "0"], {"n": 3, "seed": 0}),
        (["--early-stopping", "never"], {"early_stopping": "never"}),
        (["--early-stopping", "true"], {"early_stopping": True}),
        (["--stop", "a", "--stop", "b"], {"stop": ["a", "b"]}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--banned-token-ids", "1, 2 3"], {"banned_token_ids": [1, 2, 3]}),
        (["--bad-words-ids", "1,2", "--bad-words-ids", "3"], {"bad_words_ids": [[1, 2], [3]]}),
        (["--logit-bias", "5=-1.5", "--logit-bias", "6=2"], {"logit_bias": [(5, -1.5), (6, 2.0)]}),
        (["--json-schema", '{"type": "object"}'], {"json_schema": '{"type": "object"}'}),
        (["--regex", "[0-9]+", "--ignore-eos"], {"regex": "[0-9]+", "ignore_eos": True}),
    ],
)
def test_flags_are_parameters(arguments: list[str], expected: dict[str, Any]) -> None:
    found = sampling(parsed("source", *arguments))
    assert found == expected
    SamplingParams(**found)


def test_a_schema_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    found = sampling(parsed("source", "--json-schema", str(tmp_path / "schema.json")))
    assert found == {"json_schema": '{"type": "array"}'}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--list --json", "--list shows a table and ends; leave out --json"),
        ("x --list", "--list shows a table and ends; leave out the source"),
        ("--prompt a", "a source is missing"),
        ("x why --prompt a", "QUESTION with --prompt: both are the prompt"),
        ("-m x why --ids 1", "QUESTION with --ids: both are the prompt"),
        ("x --prompt a -c 5 --set engine.context=6", "--set engine.context=6 with --ctx-size"),
        ("x --ids 1 --prompt a", "--ids with --prompt: both are the prompt"),
        ("x --ids 1 --prompt-file a", "--ids with --prompt-file: both are the prompt"),
        ("x --prompt a --prompt-file a", "--prompt with --prompt-file: both are the prompt"),
        ("x --ids 1 --raw", "--ids with --raw: token ids are continued as they are"),
        ("x --ids 1 --system a", "--ids with --system: token ids"),
        ("x --prompt a --raw --system b", "--raw with --system: the system message is a part"),
        ("x --prompt a --greedy --temperature 1", "--greedy with --temperature: nothing is left"),
        ("x --prompt a --greedy --top-p 0.5", "--greedy with --top-p: nothing is left to chance"),
        ("x --prompt a --greedy --seed 1", "--greedy with --seed: nothing is left to chance"),
        ("x --prompt a --greedy --strategy fsd", "--greedy with --strategy: both say how"),
        ("x --prompt a --regex b --choice c", "--regex with --choice: an answer keeps to one"),
        ("x --prompt a --logprobs 1", "--logprobs needs --json, which shows them"),
        ("x --chat --ids 1", "--ids cannot go with --chat"),
        ("x --chat --json", "--json cannot go with --chat"),
        ("x --chat --raw", "--raw cannot go with --chat"),
        ("x --chat -n 2", "-n cannot go with --chat"),
        ("x --chat --prompt -", "--chat with --prompt -: the chat reads standard input itself"),
        ("x --chat --ignore-eos", "--ignore-eos in a chat needs --max-tokens"),
        ("x --json", "--json needs a prompt: --prompt or --ids"),
        (
            "x --prompt a --top-k 5 --set generation.top_k=6",
            "--set generation.top_k=6 with --top-k: both set the same",
        ),
        (
            "x --prompt a --system b --set prompt.system=c",
            "--set prompt.system=c with --system: both set the same",
        ),
    ],
)
def test_flags_that_contradict_each_other(flags: str, message: str) -> None:
    def checked() -> None:
        options = merge_alternatives(parsed(*flags.split()))
        silent = options.prompt is None and options.ids is None and options.prompt_file is None
        check(options, options.chat or silent)

    with pytest.raises(FlagError) as caught:
        checked()
    assert str(caught.value).startswith(message)


def test_flags_that_go_together() -> None:
    for flags in (
        "x --prompt a --json --logprobs 2 --temperature 0.5 --seed 1 -n 2",
        "x --chat --prompt a --system b --max-tokens 5 --ignore-eos",
        "x --raw --prompt a --set generation.top_k=6 --top-p 0.5 --strategy sample",
        "--list qwen",
    ):
        options = parsed(*flags.split())
        check(options, bool(options.chat))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beams": 3}, "--beams does nothing here: give --strategy beam"),
        ({"length_penalty": 0.5}, "--length-penalty does nothing here: give --strategy beam"),
        ({"fsd_alpha": 0.5}, "--fsd-alpha does nothing here: give --strategy fsd or random_fsd"),
        ({"penalty_alpha": 0.5}, "--penalty-alpha does nothing here: give --strategy contrastive"),
        ({"mirostat_tau": 5.0}, "--mirostat-tau does nothing here: give --mirostat"),
        ({"xtc_threshold": 0.2, "temperature": 1.0}, "--xtc-threshold does nothing here: give"),
        ({"dry_base": 2.0}, "--dry-base does nothing here: give --dry-multiplier"),
        ({"seed": 1}, "--seed does nothing here: nothing is drawn at strategy greedy"),
        ({"seed": 1, "temperature": 0.0}, "--seed does nothing here: nothing is drawn at a temp"),
        ({"top_p": 0.5, "temperature": 0.0}, "--top-p does nothing here: nothing is drawn"),
        ({"strategy": "beam", "temperature": 0.5}, "--temperature does nothing here: nothing is"),
        ({"samplers": ["top_k"], "top_p": 0.5}, "--top-p does nothing here: --samplers leaves it"),
    ],
    ids=str,
)
def test_flags_that_do_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        check_effects(given.keys(), SamplingParams(**given))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "given",
    [
        {"beams": 3, "strategy": "beam"},
        {"fsd_k": 3, "strategy": "random_fsd", "seed": 1},
        {"mirostat_tau": 3.0, "strategy": "mirostat"},
        {"xtc_threshold": 0.2, "strategy": "xtc"},
        {"top_k": 3, "strategy": "contrastive"},
        {"top_p": 0.5, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 0.5, "strategy": "fsd"},
        {"samplers": ["top_k"], "top_k": 5},
        {"min_tokens": 5, "max_tokens": 5},
    ],
    ids=str,
)
def test_flags_that_do_something(given: dict[str, Any]) -> None:
    check_effects(given.keys(), SamplingParams(**given))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LLAMA2, "--ids", "1", "--seed", "1"], "--seed does nothing here"),
        ([LLAMA2, "--ids", "1", "--prompt", "x"], "both are the prompt"),
        ([LLAMA2, "--prompt", "x", "--system", "y"], "the model has no chat template"),
        ([LLAMA2, "--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (
            [SPEC, "--prompt", "x", "--strategy", "bean"],
            "--strategy must be one of the allowed",
        ),
        ([SPEC, "--prompt", "x", "--json-schema", "{"], "json_schema"),
        ([SPEC, "--prompt", "x", "-n", "2"], "set a temperature above 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert words in printed.err


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([SPEC, "--json", "--max-tokens", "6", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_beam_search(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--raw", "--prompt", "The capital of France is", "--strategy", "beam", "--beams", "3"]
    found = answers(capsys, *flags)
    assert found["text"].startswith(" Paris")
    assert len(found["token_ids"]) == 6


def test_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    flags: Sequence[str] = ("--prompt", "Hi", "-n", "3", "--temperature", "1.5", "--seed", "1")
    found = answers(capsys, *flags)
    assert len(found["answers"]) == 3
    assert len({answer["text"] for answer in found["answers"]}) > 1
    assert found["usage"]["completion_tokens"] == sum(len(a["token_ids"]) for a in found["answers"])
    assert main([SPEC, "--max-tokens", "3", *flags]) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("---")] == [
        *("--- 1 of 3", "--- 2 of 3", "--- 3 of 3")
    ]


def test_constraints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert answers(capsys, "--prompt", "Hi", "--regex", "[0-9]{3}")["text"].isdecimal()
    chosen = answers(capsys, "--prompt", "Hi", "--choice", "yes", "--choice", "no")
    assert chosen["text"] in ("yes", "no")
    (tmp_path / "schema.json").write_text('{"enum": [17]}')
    found = answers(capsys, "--prompt", "Hi", "--json-schema", str(tmp_path / "schema.json"))
    assert found["text"] == "17"


def test_a_prompt_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("The capital of France is")
    found = answers(capsys, "--raw", "--prompt-file", str(tmp_path / "prompt.txt"))
    assert found["text"].startswith(" Paris")
    (tmp_path / "prompt.txt").write_bytes(b"\xff\xfe")
    assert main([SPEC, "--prompt-file", str(tmp_path / "prompt.txt")]) == 2
    assert "is no text in UTF-8" in capsys.readouterr().err
