"""Command lines as users of llama.cpp and vLLM write them, slips of the finger, short helps."""

import argparse
import re

import pytest

from jinfer.cli.terminal.flag_conflicts import merge_alternatives
from jinfer.cli.terminal.generate_flags import make_parser
from jinfer.cli.terminal.run_generate import _overrides
from jinfer.client import make_parser as client
from jinfer.server.serve_flags import make_parser as server


def refusal(made: argparse.ArgumentParser, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as ended:
        made.parse_args(line.split())
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    return printed.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m --maxtokens 5", "there is no flag --maxtokens; did you mean --max-tokens?"),
        ("m --temprature 0", "did you mean --temperature?"),
        ("m --systm=x", "there is no flag --systm; did you mean --system?"),
        ("m --xyzzy", "there is no flag --xyzzy (jinfer generate --help)"),
        (
            "m -ngl 99",
            "there is no flag -ngl: a GPU that JAX finds computes all layers; --set part",
        ),
        ("m --n-gpu-layers=99", "partition.cpu_layers"),
        ("m --tensor-parallel-size 2", 'partition.devices=0&1"'),
        (
            "m --cpu-offload-gb 3",
            "there is no flag --cpu-offload-gb: --set partition.streamed_layers",
        ),
        ("m --lora x.gguf", "there is no flag --lora: "),
        ("m --port 8080", "there is no flag --port: it is for jinfer serve"),
        ("m --grammar nowhere.gbnf", "nowhere.gbnf: there is no such file"),
        ("m --json-schema there/is/none.json", "none.json: there is no such file"),
        ("m -c x", "'x' is not a whole number"),
        ("m --stream", "leave it out: an answer is written as it comes"),
    ],
)
def test_mistakes(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(make_parser("jinfer generate"), line, capsys)
    assert said.startswith("error: ")
    assert words in said


def test_mistakes_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --port?" in refusal(server(), "m --prot 1", capsys)
    assert "partition.cpu_layers" in refusal(server(), "m -ngl 99", capsys)
    assert "did you mean --max-model-len?" in refusal(server(), "m --max_model_len 9", capsys)
    assert "write the question without a flag" in refusal(client("c"), "--prompt x", capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-t 4", "taskset"),
        ("--jinja", "leave it out"),
        ("--metrics", "leave it out"),
        ("--embedding", "/v1/embeddings"),
        ("--task embed", "/v1/embeddings"),
        ("--enable-lora", "--max-adapters makes room"),
        ("--verbose", "--log-level debug"),
        ("--temp 0.3", "each request"),
        ("--trust-remote-code", "no code of a checkpoint"),
    ],
)
def test_flags_of_other_servers(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(server(), f"m {line}", capsys)
    assert said.startswith(f"error: there is no flag {line.split()[0]}: ")
    assert words in said
    assert "LLM" not in said


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("m -p hello", "prompt", "hello"),
        ("m why is it --temp 0.5 blue", "prompt", "why is it blue"),
        ("-m m why", "prompt", "why"),
        ("-m m", "source", "m"),
        ("m --temp 0.5", "temperature", 0.5),
        ("m --n-predict 7", "max_tokens", 7),
        ("m --max-new-tokens 7", "max_tokens", 7),
        ("m --repeat-penalty 1.1", "repetition_penalty", 1.1),
        ("m -s 3", "seed", 3),
        ("m -t 2", "threads", 2),
        ("m -cnv", "chat", True),
        ("m -c 2048", "ctx_size", 2048),
    ],
)
def test_names_of_others(line: str, key: str, value: object) -> None:
    options = merge_alternatives(make_parser("jinfer generate").parse_args(line.split()))
    assert getattr(options, key) == value
    assert (options.source, options.model, options.question) == ("m", None, None)


def test_keys_of_the_specification() -> None:
    line = "m --max-model-len 2048 --kv-cache-dtype q8 --dtype float32"
    assert _overrides(merge_alternatives(make_parser("x").parse_args(line.split()))) == {
        "engine": {"context": 2048}, "quantization": {"kv_cache": "q8"}, "dtype": "float32"
    }  # fmt: skip


@pytest.mark.parametrize(
    "made", [make_parser("jinfer generate"), server(), client("jinfer client")]
)
def test_the_help_is_short(
    made: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        made.parse_args(["--help"])
    short = capsys.readouterr().out
    assert 10 <= len(re.findall(r"^  -", short, re.MULTILINE)) <= 12
    assert short.count("\n") < 50
    with pytest.raises(SystemExit):
        made.parse_args(["--help-all"])
    assert capsys.readouterr().out.count("\n") > 2 * short.count("\n")


def test_a_chat_says_what_it_is() -> None:
    assert "A conversation with a model." in make_parser("jinfer chat").format_help()
