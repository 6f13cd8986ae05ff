"""Sampling parameters: `SamplingParams`, the table from which all else about them is made.

A field's annotation is its type with its bounds, and `param` has its group and what else is special
about it. The checks, the columns of `SamplingMetadata`, the fields of HTTP requests and the flags
follow from it; the class's docstring is the documentation for `--help` and the routes too. Other
engines' names are in `modelspec/foreign_names.py`. `sampling_keywords.SamplingKeywords` repeats the
types, because no type checker derives keywords from a dataclass.
"""

# ruff: noqa: RUF009 (`param` gives a `dataclasses.field`)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from jinfer.modelspec.bounded_types import Count, Size, WrongValue, read_as
from jinfer.modelspec.spec_errors import show_value
from jinfer.sampling import param_types as types
from jinfer.sampling.param_field import ALIASES, by_name, param, parameters
from jinfer.sampling.param_types import MAX_BIASED
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.samplers import DEFAULTS, DETERMINISTIC, FILTERS, STRATEGIES, Strategy

# FSD and contrastive search weigh probabilities; at a temperature of 0 there would be but one.
_COLDEST = 1e-3

_choice = partial(param, group="Choice")
_filter = partial(param, group="Filters", column=True, draws=True)
_mirostat = partial(param, group="Mirostat", column=True, draws=True)
_penalty = partial(param, group="Penalties", column=True)
_dry = partial(param, group="Penalties", needs="dry_multiplier")
_words = partial(param, group="Words")
_fsd = partial(param, group="FSD", column=True, strategies="fsd random_fsd")
_random_fsd = partial(param, group="FSD", column=True, strategies="random_fsd")
_beam = partial(param, group="Search", strategies="beam")
_end = partial(param, group="Length and end")
_structure = partial(param, group="Structure")


@by_name
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's next tokens are chosen; docs/sampling.md explains each parameter.

    Samplers run in the order of the table `SAMPLERS`, or in that of `samplers`, each on the logits
    that its predecessor left. Strategies and samplers may have other engines' names, and so may
    parameters in `from_names`.

    Attributes:
        strategy: "greedy" takes the likeliest token; "sample" draws, with all filters that are
            given; a strategy with the name of a filter draws, and sets the filter to a usual value
            if it is not given; "auto" draws if a temperature above 0 or a filter is given, and is
            greedy otherwise. "fsd", "random_fsd", "contrastive" and "beam" choose in other ways.
        temperature: divides the logits; 0 is greedy; None: 1 when drawing.
        dynatemp_range, dynatemp_exponent: the temperature follows the distribution's entropy, up
            to this distance above and below.
        seed: the same seed, prompt and parameters give the same tokens; None: a random seed.
        samplers: the samplers that run, in this order; others do not run, even if their parameters
            are given.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
        min_p: only tokens of at least this share of the greatest probability (arXiv 2407.01082).
        typical_p: only the tokens nearest to the expected surprise, of this probability in all
            (arXiv 2202.00666).
        tfs_z: tail-free sampling: only this share of the curvature of the sorted probabilities.
        top_a: only tokens of at least this times the square of the greatest probability.
        top_n_sigma: only logits at most this many standard deviations below the greatest (arXiv
            2411.07641); 0 or less: off.
        xtc_probability, xtc_threshold: how often all tokens above the threshold are dropped, except
            the least likely of them.
        mirostat, mirostat_tau, mirostat_eta: version 1 or 2, target surprise in bits, and learning
            rate (arXiv 2007.14966).
        repetition_penalty: divides the logits of tokens that the sequence has, and multiplies
            negative logits (arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the answer
            has, once, and for each occurrence.
        penalty_last_n: tokens at the end that the three penalties look at; -1: all; 0: they are
            off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers:
            a token that would extend a repetition beyond the allowed length loses multiplier *
            base ** excess; texts or token ids break repetitions.
        logit_bias: id -> the number that is added to its logit; -inf bans it.
        banned_token_ids, allowed_token_ids: never these; only these, None: all.
        bad_words, bad_words_ids: texts, or sequences of ids, that are never completed.
        logits_processors: functions of your own, in JAX, that change the logits first.
        fsd_alpha, fsd_k, fsd_n, fsd_beta, fsd_pool: of FSD (arXiv 2305.12675): weight of the
            penalty, candidates, longest n-gram, smoothing, tokens that share the probability.
        random_fsd_tokens, random_fsd_probability: FSD chooses after this many tokens, and earlier
            with this probability.
        penalty_alpha: of contrastive search (arXiv 2202.06417), over `top_k` candidates.
        beams, length_penalty, early_stopping: beam search keeps the `beams` likeliest sequences and
            takes the greatest log-probability / length ** length_penalty; it ends as soon as
            enough sequences are finished (true), when a better sequence is unlikely (false), or
            when it is impossible ("never").
        n, best_of: number of answers, chosen as the likeliest of `best_of`; a beam search gives its
            `n` best beams.
        max_tokens: new tokens, at most; None: up to the context's end.
        min_tokens: no end of sequence, stop token or stop text before this many tokens, which are
            at most `max_tokens`.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer; they are not part of its text.
        ignore_eos: continue after the model's own end of sequence.
        include_stop: the stop text, or the text of the end token, is part of the answer.
        skip_special: special tokens are not part of the answer's text.
        thinking_token_budget, thinking_budget_message: tokens of thought, at most; then the message
            and the end of the thought are forced, and the answer continues; None: any number.
        logprobs: also give the log-probability of each token, and of this many likeliest tokens.
        logprob_token_ids, post_sampling_probs: give them for these ids rather than the likeliest;
            after the samplers rather than before.
        speculation: tokens may be drafted, where the model has `[speculation]`; the answer is the
            same.
        json_schema, regex, choice, grammar: constraints of the answer; at most one of them.
        capture: names of activations, or patterns with *, that are returned with the answer.
        steer: steering vectors, added to named activations at some tokens.
        edits: changes of named activations at some tokens, in their order; `steer` follows them.

    Raises:
        RequestError: a value is outside its bounds, and the message begins with the parameter's
            name; or a name is unknown.
    """

    strategy: Strategy = _choice("auto")
    temperature: types.Temperature | None = _choice(None)
    dynatemp_range: types.Temperature = _choice(0.0, column=True, draws=True)
    dynatemp_exponent: types.UpTo100 = _choice(1.0, column=True, draws=True, needs="dynatemp_range")
    seed: types.Seed | None = _choice(None, minus_one=True)
    samplers: types.Samplers | None = _choice(None)
    top_k: types.CountOrAll = _filter(0, minus_one=True)
    top_p: types.Share = _filter(1.0)
    min_p: types.Share = _filter(0.0)
    typical_p: types.Share = _filter(1.0)
    tfs_z: types.Share = _filter(1.0)
    top_a: types.Share = _filter(0.0)
    top_n_sigma: types.Deviations = _filter(-1.0)
    xtc_probability: types.Share = _filter(0.0)
    xtc_threshold: types.Share = _filter(0.1, needs="xtc_probability")
    mirostat: types.MirostatVersion = _mirostat(0)
    mirostat_tau: types.UpTo100 = _mirostat(5.0, needs="mirostat")
    mirostat_eta: types.Share = _mirostat(0.1, needs="mirostat")
    repetition_penalty: types.Factor = _penalty(1.0, fields="repetition_penalty repeat_penalty")
    presence_penalty: types.Signed = _penalty(0.0)
    frequency_penalty: types.Signed = _penalty(0.0)
    penalty_last_n: types.Window = _penalty(-1, fields="penalty_last_n repeat_last_n")
    dry_multiplier: types.UpTo100 = _penalty(0.0)
    dry_base: types.DryBase = _dry(1.75, column=True)
    dry_allowed_length: Size = _dry(2, column=True)
    dry_penalty_last_n: types.Window = _dry(-1, column=True)
    dry_sequence_breakers: types.Breakers = _dry(("\n", ":", '"', "*"))
    logit_bias: types.Biases = _words(())
    banned_token_ids: types.Ids = _words(())
    allowed_token_ids: types.SomeIds | None = _words(None)
    bad_words: types.Words = _words(())
    bad_words_ids: types.IdSequences = _words(())
    logits_processors: types.Processors = _words(())
    fsd_alpha: types.Share = _fsd(0.5)
    fsd_k: types.Candidates = _fsd(6)
    fsd_n: types.Ngram = _fsd(3)
    fsd_beta: types.Share = _fsd(0.9)
    fsd_pool: types.Pool = _fsd(50)
    random_fsd_tokens: Count = _random_fsd(10)
    random_fsd_probability: types.Share = _random_fsd(0.5)
    penalty_alpha: types.Share = param(0.6, "Search", strategies="contrastive")
    beams: types.Beams = _beam(4)
    length_penalty: types.Signed = _beam(1.0)
    early_stopping: bool | Literal["never"] = _beam(False)
    n: types.Answers = param(1)
    best_of: types.Answers | None = param(None)
    max_tokens: Size | None = _end(
        256, fields="max_tokens max_completion_tokens n_predict", minus_one=True
    )
    min_tokens: Count = _end(0, column=True)
    stop: types.Stops = _end(())
    stop_token_ids: types.StopIds = _end(())
    ignore_eos: bool = _end(False, column=True)
    include_stop: bool = _end(False, fields="include_stop_str_in_output")
    skip_special: bool = _end(True, fields="skip_special_tokens")
    thinking_token_budget: Count | None = _end(
        None,
        fields="thinking_token_budget thinking_budget_tokens reasoning_budget_tokens",
        minus_one=True,
    )
    thinking_budget_message: types.Text | None = _end(
        None,
        fields="thinking_budget_message reasoning_budget_message",
        needs="thinking_token_budget",
    )
    logprobs: types.Logprobs | None = param(None, fields="n_probs")
    logprob_token_ids: types.LogprobIds = param((), needs="logprobs")
    post_sampling_probs: bool = param(False, needs="logprobs")
    speculation: bool = param(True, "Speculation")
    json_schema: types.Schema | None = _structure(None)
    regex: types.Text | None = _structure(None)
    choice: types.SomeTexts | None = _structure(None)
    grammar: types.Text | None = _structure(None)
    capture: types.Capture = param(())
    steer: types.Steers = param(())
    edits: types.Edits = param(())

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        strategy, sets = STRATEGIES.get(self.strategy, (self.strategy, {}))
        set_(self, "strategy", strategy)
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if value is parameter.default:
                continue
            try:
                set_(self, name, read_as(parameter.type, value))
            except WrongValue as wrong:
                raise _outside(name, wrong.expected, wrong.value, wrong.hint) from None
        for name, value in {**DEFAULTS.get(strategy, {}), **sets}.items():
            if getattr(self, name) == PARAMETERS[name].default:
                set_(self, name, value)
        for name, right, expected in self._rules():
            if not right:
                raise _outside(name, expected, getattr(self, name))

    @classmethod
    def from_names(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters under jinfer's names or other engines' (`ALIASES`).

        Raises:
            RequestError: as the class does, or one parameter is given by two names.
        """
        return cls(**canonical_names(values))

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        """Rules between parameters: the name of one, whether the rule holds, the allowed values."""
        pairs = cast("tuple[tuple[int, float], ...]", self.logit_bias)
        few = len({*self.banned_token_ids, *(id for id, _ in pairs)}) <= MAX_BIASED
        yield "logit_bias", few, f"at most {MAX_BIASED} ids, with the banned ones"
        if self.allowed_token_ids is not None:
            banned = {*self.banned_token_ids, *(id for id, bias in pairs if bias == float("-inf"))}
            some = bool({*self.allowed_token_ids} - banned)
            yield "allowed_token_ids", some, "ids of which not all are banned"
        max_tokens = self.max_tokens
        yield (
            "min_tokens",
            max_tokens is None or self.min_tokens <= max_tokens,
            f"at most max_tokens ({max_tokens})",
        )
        yield "best_of", self.best_of is None or self.best_of >= self.n, f"at least n ({self.n})"
        samples = self.strategy not in (*DETERMINISTIC, "random_fsd")
        yield "mirostat", not self.mirostat or samples, f'0 with the strategy "{self.strategy}"'
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            yield given[1], False, f"left out: {given[0]} is given"

    @property
    def constrained(self) -> bool:
        """Whether the answer has a constraint."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn at random."""
        if self.strategy == "random_fsd":
            return True
        if self.strategy in DETERMINISTIC or self.temperature == 0:
            return False
        if self.strategy != "auto" or self.temperature is not None:
            return True
        return any(sampler.active(self) for sampler in FILTERS)

    @property
    def chain_temperature(self) -> float:
        """The divisor of the logits where the sampler chain has a temperature."""
        value = 1.0 if self.temperature is None else self.temperature
        return max(value, _COLDEST) if self.strategy in ("fsd", "random_fsd") else value

    @property
    def drawing_temperature(self) -> float:
        """The temperature to draw with; 0 where nothing is drawn."""
        return self.chain_temperature if self.draws else 0.0


def _outside(name: str, expected: str, value: Any, hint: str = "") -> RequestError:
    return RequestError(f"{name} must be {expected}, not {show_value(value)}{hint}")


PARAMETERS = parameters(SamplingParams)
CONSTRAINTS = tuple(p.name for p in PARAMETERS.values() if p.group == "Structure")  # one at most
ACTIVATIONS = ("capture", "steer", "edits")  # objects of Python: no flags set them


def canonical_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """A request's parameters under jinfer's names; unknown names stay.

    Inferflow's `decoding_alg` may be an object, whose "name" is the strategy and whose other keys
    are its parameters.

    Raises:
        RequestError: one parameter is given by two names.
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        canonical = ALIASES.get(name, name)
        given = {canonical: value}
        if canonical == "strategy" and isinstance(value, Mapping):
            inner = canonical_names({key: v for key, v in value.items() if key != "name"})
            given = {"strategy": value.get("name", ""), **inner}
        for key, item in given.items():
            if key in named:
                raise RequestError(f"{name}: {key} is given twice; leave one out")
            named[key] = item
    return named
