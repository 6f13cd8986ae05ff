"""Subcommands of `jinfer`: the table of their names, modules and help texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: one word, or two words of which the first names a group.
        module: the module whose function `main` runs the command.
        about: one line of help.
        first: arguments inserted before the user's.
    """

    name: str
    module: str
    about: str
    first: tuple[str, ...] = ()


COMMANDS = (
    Command("generate", "jinfer.generate", "answer a prompt"),
    Command("chat", "jinfer.generate", "a conversation in the terminal", ("--chat",)),
    Command("serve", "jinfer.serve", "answer over HTTP"),
    Command("client", "jinfer.client", "talk to a server"),
    Command("list", "jinfer.cli.list_models", "the models that are known by name"),
    Command("pull", "jinfer.cli.pull_model", "fetch a model's weights, or say how"),
    Command("docs", "jinfer.cli.show_docs", "the pages of the documentation"),
    Command("inspect", "jinfer.tools.inspect", "what a checkpoint is, tensor by tensor"),
    Command("quantize", "jinfer.tools.quantize", "write a quantized checkpoint"),
    Command("rotate", "jinfer.tools.rotate_weights", "write an equal model with other weights"),
    Command("perplexity", "jinfer.tools.perplexity", "the perplexity of a text"),
    Command("quality", "jinfer.tools.quality", "quality against bits per weight"),
    Command("bench cpu", "jinfer.tools.bench_cpu", "speed on a CPU, alone or beside llama.cpp"),
    Command("bench engine", "jinfer.tools.bench_engine", "what streams feel of one another"),
    Command("bench serve", "jinfer.tools.bench_serve", "how a server stands load"),
    Command("bench speculate", "jinfer.tools.bench_speculate", "what drafts of tokens gain"),
    Command("bench linear", "jinfer.tools.bench_linear", "products with quantized matrices"),
    Command("bench kernels", "jinfer.tools.bench_kernels", "the kernels of a GPU"),
    Command("bench programs", "jinfer.tools.bench_programs", "whole steps and prompts on a GPU"),
    Command("bench offload", "jinfer.tools.bench_offload", "splits between a GPU and its host"),
    Command("bench partition", "jinfer.tools.bench_partition", "splits over several devices"),
    Command("bench models", "jinfer.tools.bench_models", "write checkpoints to measure with"),
)
GROUPS = {"bench": "measure, or write what is measured with"}
