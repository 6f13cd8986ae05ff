"""Speculative decoding benchmark: `jinfer bench speculate SOURCE [--json FILE]`.

All results are ratios to plain decoding, measured in turns on one engine:

- a plain run is recorded and replayed as drafts, each token of which is right with a given
  probability: tokens per call compared with the formula, and speed, over acceptance rates, draft
  sizes and numbers of streams;
- prompt lookup on a prompt whose answer copies it, and on one whose answer edits it.

Answers are compared: a token that differs ends the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinfer.api.llm import LLM
from jinfer.cli.bench.bench_figures import check_plot, plot, row, spread, spread_text, table
from jinfer.cli.run_command import JSON, SET, SOURCE, SVG, command, overrides_of, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.engine.output.completion import Completion
from jinfer.engine.requests import RequestError
from jinfer.modelspec.toml_tables import merge
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.speculate.draft_length import DraftLength
from jinfer.speculate.prompt_lookup import PromptLookup
from jinfer.speculate.replay_drafter import ReplayDrafter
from jinfer.speculate.speculative_decoding import SpeculativeDecoder

_PASSAGE = (
    "The harbour master keeps three ledgers. In the first he writes the name of every ship, the "
    "hour at which it came, and the flag that it flew. In the second he writes what it carried: "
    "barrels of salted fish, bales of wool, timber from the north, and now and then a crate of "
    "oranges. In the third ledger he writes what nobody asks him for: the colour of the sky."
)
_HEADS = ("drafts", "streams", "tokens a call", "formula", "right", "times plain decoding")
_COPIED = 96  # tokens of the passage, or a little more
_PROMPTS = {
    "copying": f"Repeat this text exactly, word for word:\n\n{_PASSAGE}",
    "editing": f"Repeat this text exactly, but write 'fleet' instead of 'ship':\n\n{_PASSAGE}",
}


class PairedRuns:
    """Prompts that are answered with and without drafts in turn."""

    def __init__(self, llm: LLM, prompts: list[list[int]], tokens: int, rounds: int) -> None:
        self.llm, self.prompts, self.rounds = llm, prompts, rounds
        self.params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.answers = self._answers(None)[1]

    def _answers(self, speculation: SpeculativeDecoder | None) -> tuple[float, list[Completion]]:
        """Seconds of decoding, and the answers."""
        self.llm.session.engine.speculator = speculation
        begun = time.perf_counter()
        answers = self.llm.generate(self.prompts, self.params)
        whole = time.perf_counter() - begun
        # A stream's own time has no prompt in it; several overlap.
        return answers[0].usage.decode_seconds if len(answers) == 1 else whole, answers

    def gain(
        self,
        name: str,
        speculation: SpeculativeDecoder,
        accuracy: float | None = None,
        formula: float | None = None,
    ) -> DraftGain:
        """Measures; the first round is a warm-up."""
        for future in speculation.announce():
            future.result()
        ratios = []
        for _ in range(self.rounds + 1):
            plain, _ = self._answers(None)
            drafted, answers = self._answers(speculation)
            if [answer.token_ids for answer in answers] != [
                answer.token_ids for answer in self.answers
            ]:
                raise RequestError(f"{name}: the answer is another one than without drafts")
            ratios.append(plain / drafted)
        self.llm.session.engine.speculator = None
        uses = [answer.usage for answer in answers]
        new = sum(use.completion_tokens - 1 for use in uses)
        accepted = sum(use.accepted_tokens for use in uses)
        return DraftGain(
            name,
            len(answers),
            ratios[1:],
            max(1, new - accepted),
            new,
            accepted,
            sum(use.drafted_tokens for use in uses),
            accuracy,
            speculation.draft_length.nodes,
            formula,
        )


def replayed(turns: PairedRuns, accuracy: float, nodes: int | None) -> DraftGain:
    """Drafts that are right with a given probability."""
    prompts = [tuple(prompt) for prompt in turns.prompts]
    answers = dict(zip(prompts, (answer.token_ids for answer in turns.answers), strict=True))
    replay = ReplayDrafter(answers, accuracy, turns.llm.spec.dims["vocab"])
    name = f"replay, {accuracy:.1f}, {nodes or 'auto'} nodes"
    formula = None
    if nodes is not None:
        formula = (1 - accuracy**nodes) / (1 - accuracy) if accuracy < 1 else float(nodes)
    engine = turns.llm.session.engine
    speculation = SpeculativeDecoder(engine, [replay], DraftLength(nodes), branched=False)
    return turns.gain(name, speculation, accuracy, formula)


@command(
    "Measures the speedup of speculative decoding.",
    SOURCE,
    argument(
        "--accuracy",
        type=float,
        nargs="+",
        metavar="A",
        default=[0.0, 0.6, 0.7, 0.8, 0.9],
        help="probability that a drafted token is right",
    ),
    argument(
        "--nodes",
        type=int,
        nargs="+",
        metavar="N",
        default=[4, 8, 0],
        help="tokens of a draft; 0: chosen at run time",
    ),
    argument("--streams", type=int, nargs="+", metavar="N", default=[1], help="concurrent answers"),
    argument("--tokens", type=int, default=128, help="tokens per answer"),
    argument("--rounds", type=int, default=5),
    SET,
    JSON,
    SVG,
)
def main(options: argparse.Namespace) -> int:
    """Print the measurements."""
    check_plot(options.svg)
    overrides = overrides_of(options.set)
    slots = max(options.streams)
    found: list[DraftGain] = []
    print(table(_HEADS, []))
    with LLM(
        options.source, progress=True, **merge({"engine": {"slots": slots}}, overrides)
    ) as llm:
        vocab = llm.spec.dims["vocab"]
        for streams in options.streams:
            prompts = [[(7 * i + 3 * j) % (vocab - 3) + 3 for j in range(32)] for i in range(slots)]
            turns = PairedRuns(llm, prompts[:streams], options.tokens, options.rounds)
            for accuracy in options.accuracy:
                for nodes in options.nodes:
                    found.append(replayed(turns, accuracy, nodes or None))
                    print(found[-1].line(), flush=True)
        tokens = min(options.tokens, _COPIED)
        if llm.can_chat:
            for name, text in _PROMPTS.items():
                turns = PairedRuns(llm, [llm.encode_chat(text)], tokens, options.rounds)
                speculation = SpeculativeDecoder(llm.session.engine, [PromptLookup(branches=2)])
                found.append(turns.gain(f"lookup, {name}", speculation))
                print(found[-1].line(), flush=True)
    write_json(options.json, [asdict(gain) for gain in found])
    if options.svg:
        drawing(found, options.svg, Path(options.source).stem)
    return 0


@dataclass(frozen=True)
class DraftGain:
    """A way of drafting relative to plain decoding.

    Attributes:
        name: of the drafter.
        streams: parallel answers.
        ratios: seconds without drafts over seconds with them, of each round.
        calls, tokens: of one round: tokens beyond the first of each answer.
        accepted, drafted: tokens of drafts.
        accuracy: the probability that a replayed token is right; None: not replayed.
        nodes: draft tokens per call; None: as many as pay off.
        formula: expected tokens per call, if known.
    """

    name: str
    streams: int
    ratios: list[float]
    calls: float
    tokens: int
    accepted: int
    drafted: int
    accuracy: float | None = None
    nodes: int | None = None
    formula: float | None = None

    @property
    def middle(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    def line(self) -> str:
        """A row of the table."""
        right = f"{self.accepted / self.drafted:.2f}" if self.drafted else ""
        formula = "" if self.formula is None else f"{self.formula:.2f}"
        rate = f"{self.tokens / self.calls:.2f}"
        gain = spread_text(spread(self.ratios))
        return row([self.name, self.streams, rate, formula, right, gain])


def drawing(gains: Sequence[DraftGain], path: str, title: str = "") -> None:
    """Replayed drafts as lines with the rounds' extremes, all others as bars; an SVG or PNG."""
    replayed = [gain for gain in gains if gain.accuracy is not None]
    others = [gain for gain in gains if gain.accuracy is None]
    widths = [3, 1] if others else [1]
    with plot(path, 1, len(widths), figsize=(9, 3.4), width_ratios=widths, squeeze=False) as axes:
        lines = axes[0, 0]
        for streams, nodes in dict.fromkeys((gain.streams, gain.nodes) for gain in replayed):
            own = sorted(
                (gain for gain in replayed if (gain.streams, gain.nodes) == (streams, nodes)),
                key=lambda gain: gain.accuracy or 0.0,
            )
            more = f", {streams} streams" if streams > 1 else ""
            lines.errorbar(
                [gain.accuracy or 0.0 for gain in own],
                [gain.middle for gain in own],
                [
                    [gain.middle - min(gain.ratios) for gain in own],
                    [max(gain.ratios) - gain.middle for gain in own],
                ],
                fmt="o-",
                capsize=3,
                label=f"{nodes or 'as many as pay'}{more}",
            )
        lines.set_xlabel("chance that a drafted token is right")
        lines.set_ylabel("times plain decoding")
        if replayed:
            lines.legend(title="nodes of a call", fontsize="small")
        if others:
            bars = axes[0, 1]
            names = [gain.name.replace(", ", ",\n") for gain in others]
            bars.bar(names, [gain.middle for gain in others])
            bars.axhline(1.0, color="grey", linestyle=":")
        lines.axhline(1.0, color="grey", linestyle=":")
        lines.figure.suptitle(title)
