"""Subcommands of `jinfer`: the table of their names, modules and help texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
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
    Subcommand("generate", "jinfer.generate", "answer a prompt"),
    Subcommand("chat", "jinfer.generate", "a conversation in the terminal", ("--chat",)),
    Subcommand("serve", "jinfer.serve", "answer over HTTP"),
    Subcommand("client", "jinfer.client", "talk to a server"),
    Subcommand("list", "jinfer.cli.list_models", "the models that are known by name"),
    Subcommand("pull", "jinfer.cli.pull_model", "fetch a model's weights, or say how"),
    Subcommand("docs", "jinfer.cli.show_docs", "the pages of the documentation"),
    Subcommand("inspect", "jinfer.tools.inspect", "what a checkpoint is, tensor by tensor"),
    Subcommand("look", "jinfer.tools.look", "what a model does, as a picture in a file"),
    Subcommand("quantize", "jinfer.tools.quantize", "write a quantized checkpoint"),
    Subcommand("rotate", "jinfer.tools.rotate_weights", "write an equal model with other weights"),
    Subcommand("perplexity", "jinfer.tools.perplexity", "the perplexity of a text"),
    Subcommand("quality", "jinfer.tools.quality", "quality against bits per weight"),
    Subcommand("bench cpu", "jinfer.tools.bench_cpu", "speed on a CPU, alone or beside llama.cpp"),
    Subcommand("bench engine", "jinfer.tools.bench_engine", "what streams feel of one another"),
    Subcommand("bench serve", "jinfer.tools.bench_serve", "how a server stands load"),
    Subcommand("bench speculate", "jinfer.tools.bench_speculate", "what drafts of tokens gain"),
    Subcommand("bench lora", "jinfer.tools.bench_lora", "what LoRA adapters cost"),
    Subcommand("bench linear", "jinfer.tools.bench_linear", "products with quantized matrices"),
    Subcommand("bench kernels", "jinfer.tools.bench_kernels", "the kernels of a GPU"),
    Subcommand("bench programs", "jinfer.tools.bench_programs", "whole steps and prompts on a GPU"),
    Subcommand("bench offload", "jinfer.tools.bench_offload", "splits between a GPU and its host"),
    Subcommand("bench partition", "jinfer.tools.bench_partition", "splits over several devices"),
    Subcommand("bench models", "jinfer.tools.bench_models", "write checkpoints to measure with"),
)
GROUPS = {"bench": "measure, or write what is measured with"}
