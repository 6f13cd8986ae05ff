"""The model specifications that come with jinfer: each resolves, and says what it needs to say."""

import re
from functools import cache
from pathlib import Path

import pytest

from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_files import (
    families,
    format_table,
    model_specs,
    read_toml,
    specs_folder,
    with_families,
)
from jinfer.template import ChatTemplate, PromptTemplate
from jinfer.tokenizer import load_tokenizer
from tests.modelspec.cases import cases

SPECS = [*model_specs().values()]
# One repository's files of several models, or several specifications of one model.
HUB = re.compile(r"hf://[\w.-]+/[\w.-]+(/[\w./-]+\.(gguf|bin))?")


@cache
def checkpoints() -> dict[str, CheckpointFacts]:
    """A small checkpoint, as published ones describe themselves, for every family."""
    return {case.family: case.facts for case in cases()}


def test_there_are_specifications() -> None:
    assert len(SPECS) > 100


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_resolves_for_a_checkpoint_of_its_family(path: Path) -> None:
    table = read_toml(path)
    known = checkpoints()[table["family"]]
    spec = resolve(with_families(table, path), str(path), known, format_table(known.format))
    assert spec.decoder is not None or len(spec.stacks) == 1
    assert spec.prompt.template == table.get("prompt", {}).get("template")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_says_what_it_is(path: Path) -> None:
    table = read_toml(path)
    assert len(table["description"]) > 10
    assert not table["description"].endswith(".")
    assert table["family"] in families()
    assert re.fullmatch(r"[a-z0-9_.]+", path.stem)
    weights = table["weights"]
    assert weights.startswith("package://") or HUB.fullmatch(weights)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_its_template_asks_the_question(path: Path) -> None:
    prompt = read_toml(path).get("prompt", {})
    assert len({"template", "chat_template", "fallback"} & set(prompt)) <= 1
    template = prompt.get("template")
    if template is None:
        assert "base model" not in read_toml(path)["description"]  # it has none of its own
        return
    parts = PromptTemplate.parse(template).parts
    assert sum(getattr(part, "name", "") in ("query", "_query") for part in parts) == 1


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
]
CHATML = """<|im_start|>system
S<|im_end|>
<|im_start|>user
Q1<|im_end|>
<|im_start|>assistant
A1<|im_end|>
<|im_start|>user
Q2<|im_end|>
<|im_start|>assistant
"""
RENDERED = {
    "aquila_chat2_34b": "S\n\n### Human: Q1\n### Assistant: A1</s>### Human: Q2\n### Assistant: ",
    "falcon_180b_chat": "System: S\nUser: Q1\nFalcon: A1\nUser: Q2\nFalcon:",
    "falcon_40b_instruct": "S\nUser: Q1\nAssistant: A1\nUser: Q2\nAssistant:",
    "falcon_7b_instruct": "S\nUser: Q1\nAssistant: A1\nUser: Q2\nAssistant:",
    "internlm_chat_20b": "<s><|System|>:S\n<|User|>:Q1\n<|Bot|>:A1<eoa>\n<|User|>:Q2\n<|Bot|>:",
    "llama2_7b_chat.gguf": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ1 [/INST] A1 </s><s>[INST] Q2 [/INST]"
    ),
    "minicpm_2b_dpo_bf16": "<s>S<用户>Q1<AI>A1<用户>Q2<AI>",
    "mpt_30b_chat": CHATML,
    "mpt_7b_chat": CHATML,
}


def chat_templates() -> dict[str, str]:
    prompts = {path.stem: read_toml(path).get("prompt", {}) for path in SPECS}
    found = {name: p.get("chat_template", p.get("fallback")) for name, p in prompts.items()}
    return {name: template for name, template in found.items() if template is not None}


def test_every_chat_template_is_known() -> None:
    assert set(chat_templates()) == set(RENDERED)


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_is_written_as_the_model_has_learnt(name: str) -> None:
    template = ChatTemplate(
        chat_templates()[name], variables={"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert template.render(CONVERSATION) == RENDERED[name]


@pytest.mark.parametrize("name", RENDERED)
def test_an_answer_that_has_begun_goes_on(name: str) -> None:
    template = ChatTemplate(
        chat_templates()[name], variables={"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert template.render(CONVERSATION[:3]).endswith("A1")
    assert template.render(CONVERSATION[:3]).startswith(template.render(CONVERSATION[:2]))
    assert template.render(CONVERSATION[1:2]).count("Q1") == 1


# "Q1" and so on stand for the pieces of these texts.
ENCODED: dict[str, list[int | str]] = {
    "baichuan2_7b_chat": ["S", 195, "Q1", 196, "A1", 195, "Q2", 196],
    "baichuan2_13b_chat": ["S", 195, "Q1", 196, "A1", 195, "Q2", 196],
    "chatglm2_6b": [
        *(64790, 64792),
        "[Round 1]\n\n问\uff1aS\n\nQ1\n\n答\uff1aA1\n\n[Round 2]\n\n问\uff1aQ2\n\n答\uff1a",
    ],
    "chatglm3_6b": [
        *(64790, 64792),
        *(64795, "\n S\n\nQ1", 64796, "\n A1", 64795, "\n Q2", 64796),
    ],
}


def test_every_template_of_turns_is_known() -> None:
    templates = {path.stem: read_toml(path).get("prompt", {}).get("template") for path in SPECS}
    assert {name for name, text in templates.items() if text and "{turn}" in text} == set(ENCODED)


@pytest.mark.parametrize("name", ENCODED)
def test_turns_follow_each_other_as_the_model_has_learnt(name: str) -> None:
    template = PromptTemplate.parse(
        read_toml(specs_folder() / f"{name}.toml")["prompt"]["template"]
    )
    tokenizer = load_tokenizer(Path(__file__).parent / "goldens" / "tok_spm_bpe")
    assert tokenizer is not None
    assert template.encode_chat(tokenizer, CONVERSATION) == tokenizer.encode_parts(ENCODED[name])
    # What the model itself has written begins with the space or line that stands before it.
    written = [*CONVERSATION[:2], {"role": "assistant", "content": "\n A1"}, CONVERSATION[3]]
    assert template.encode_chat(tokenizer, written) == tokenizer.encode_parts(ENCODED[name])


def test_no_two_are_the_same() -> None:
    weights = [read_toml(path)["weights"] for path in SPECS]
    assert len(set(weights)) == len(weights)
    descriptions = [read_toml(path)["description"] for path in SPECS]
    assert len(set(descriptions)) == len(descriptions)
