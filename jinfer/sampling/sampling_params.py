"""What a request asks of the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, cast, get_args

from jinfer.modelspec.spec_errors import show
from jinfer.sampling.param_names import (
    DEFAULTS,
    SAMPLERS,
    STRATEGIES,
    Strategy,
    own_names,
    own_sampler,
)
from jinfer.sampling.param_ranges import (
    MAX_BAD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_BREAKERS,
    MAX_STOP_IDS,
    OPTIONAL,
    RANGES,
    is_id,
)
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.unknown_params import no_parameter

# Strategies that choose without chance.
_SURE = ("greedy", "fsd", "contrastive", "beam")
# FSD and contrastive search weigh probabilities; at a temperature of 0 there would be but one.
_COLDEST = 1e-3


_LISTS = (
    "samplers",
    "stop",
    "stop_token_ids",
    "dry_sequence_breakers",
    "bad_words",
    "banned_token_ids",
    "allowed_token_ids",
    "choice",
)
_ABSENT = ("samplers", "allowed_token_ids", "choice")  # of these, which may be None

CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")  # at most one of them is given


def _by_name[T](cls: type[T]) -> type[T]:
    """A record whose wrong names are a `RequestError`, in one line, as its wrong values are."""
    names = frozenset(field.name for field in fields(cast("Any", cls)))
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: T, *args: object, **values: object) -> None:
        if args:
            raise RequestError(f"give parameters by name: {cls.__name__}(max_tokens=50)")
        if not names >= values.keys():
            wrong = next(name for name in values if name not in names)
            raise RequestError(no_parameter(wrong, names))
        init(self, **values)

    cast("Any", cls).__init__ = checked
    return cls


@_by_name
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of the choice of tokens; docs/sampling.md says more of each.

    Stages run in the order of `param_names.STAGES`, or as `samplers` says, each on what
    the one before left. Other engines' names of strategies and samplers are taken too, and those
    of parameters by `from_names`.

    Attributes:
        strategy: "greedy" takes the likeliest token; "sample" draws, with every filter given;
            those named after a filter draw, and set it to a usual value if it is not given; "auto"
            draws if a temperature above 0 or a filter is given, and is greedy otherwise. "fsd",
            "random_fsd", "contrastive" and "beam" choose in their own ways.
        samplers: which stages run, in which order; others do not, whatever their parameters say.
        temperature: logits are divided by it; 0 is greedy; None: 1 when drawing.
        dynatemp_range, dynatemp_exponent: the temperature follows the distribution's entropy, so
            far to both sides.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
        min_p: only tokens at least this share of the likeliest's probability (arXiv 2407.01082).
        typical_p: only the tokens of the most expected surprise, of this mass (arXiv 2202.00666).
        tfs_z: no tail: this share of the curvature of the sorted probabilities.
        top_a: only tokens of at least this times the likeliest's probability squared.
        top_n_sigma: only logits so many standard deviations below the greatest (arXiv 2411.07641);
            0 or less: off.
        xtc_probability, xtc_threshold: how often all but the least likely of those above the
            threshold are dropped.
        mirostat, mirostat_tau, mirostat_eta: version 1 or 2, surprise in bits that it keeps to,
            and how fast (arXiv 2007.14966).
        repetition_penalty: divides the logits of tokens there were (arXiv 1909.05858), multiplies
            negative ones.
        presence_penalty, frequency_penalty: taken from the logits of tokens that the answer has,
            once, and each time.
        penalty_last_n: tokens at the end that the three look at; -1: all; 0: they are off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers:
            what would go on repeating more than the allowed length loses multiplier * base **
            excess; texts or token ids break repetitions.
        logit_bias: id -> what is added to its logit; -inf bans it.
        banned_token_ids, allowed_token_ids: never these; None or only these.
        bad_words, bad_words_ids: texts, or sequences of ids, that are not completed.
        fsd_alpha, fsd_k, fsd_n, fsd_beta, fsd_pool: of FSD (arXiv 2305.12675): weight of the
            penalty, candidates, longest n-gram, smoothing, tokens that share the probability.
        random_fsd_tokens, random_fsd_probability: FSD after so many tokens, before so often.
        penalty_alpha: of contrastive search (arXiv 2202.06417), over `top_k` candidates.
        beams, length_penalty, early_stopping: of beam search, which keeps the `beams` likeliest
            sequences and takes that with the greatest log-probability / length ** length_penalty;
            whether enough finished ones end it at once, when better ones are unlikely (False), or
            impossible ("never").
        n, best_of: answers given, and how many they are the likeliest of; a beam search gives its
            `n` best beams.
        seed: the same seed, prompt and parameters give the same tokens; None: a new one.
        max_tokens: at most so many new tokens; None: up to the context's end.
        min_tokens: no end of sequence, stop token or stop text before so many, which are at most
            `max_tokens`.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer; they are not part of its text.
        ignore_eos: go on after the model's own end of sequence.
        include_stop: what ends the answer, a stop text or an end's own text, is part of it.
        skip_special: special tokens are not part of the answer's text.
        logprobs: also give the log-probability of each token, and of so many likeliest ones.
        speculation: tokens may be drafted, where the model has `[speculation]`; the answer is the
            same.
        json_schema, regex, choice, grammar: what the answer has to be; at most one of them.

    Raises:
        RequestError: for a value outside its range, where the message begins with the parameter's
            name; for a name that is no parameter's.
    """

    strategy: Strategy = "auto"
    samplers: tuple[str, ...] | list[str] | None = None
    temperature: float | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    tfs_z: float = 1.0
    top_a: float = 0.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str | int, ...] | list[str | int] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    banned_token_ids: tuple[int, ...] | list[int] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] | list[list[int]] = ()
    fsd_alpha: float = 0.5
    fsd_k: int = 6
    fsd_n: int = 3
    fsd_beta: float = 0.9
    fsd_pool: int = 50
    random_fsd_tokens: int = 10
    random_fsd_probability: float = 0.5
    penalty_alpha: float = 0.6
    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    speculation: bool = True
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, value in self._plain().items():
            set_(self, name, value)
        strategy, given = STRATEGIES.get(self.strategy, (self.strategy, {}))
        set_(self, "strategy", strategy)
        for name, value in {**DEFAULTS.get(strategy, {}), **given}.items():
            if getattr(self, name) == getattr(type(self), name):
                set_(self, name, value)
        for name, right, expected in (*self._ranges(), *self._rules()):
            if not right:
                raise RequestError(f"{name} must be {expected}, not {show(getattr(self, name))}")

    @classmethod
    def from_names(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters under jinfer's names or other engines' (`names.PARAMETERS`).

        Raises:
            RequestError: as the class does, or one parameter is given by two names.
        """
        return cls(**own_names(values))

    def _plain(self) -> dict[str, Any]:
        """The parameters that may be written in several ways, in one; wrong ones as they are."""
        plain: dict[str, Any] = {}
        for name in _LISTS:
            value: Any = getattr(self, name)
            if isinstance(value, str) and name in ("stop", "bad_words"):
                plain[name] = (value,)
            elif isinstance(value, Iterable) and not isinstance(value, str):
                plain[name] = tuple(value)
            elif not isinstance(value, str) and (value is not None or name not in _ABSENT):
                raise RequestError(f"{name} must be a list, not {show(value)}")
        if self.samplers is not None:
            plain["samplers"] = tuple(map(own_sampler, plain.get("samplers", ())))
        plain["bad_words_ids"] = _each(
            "bad_words_ids", "lists of token ids", tuple, self.bad_words_ids
        )
        for name in RANGES:  # NumPy's numbers are no Python ones
            value = getattr(self, name)
            if not isinstance(value, int | float) and getattr(value, "ndim", None) == 0:
                plain[name] = value.item()
        bias: Any = () if self.logit_bias is None else self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        plain["logit_bias"] = _each("logit_bias", "id -> number", _pair, pairs)
        return plain

    def _ranges(self) -> Iterable[tuple[str, bool, str]]:
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            yield name, (value is None and name in OPTIONAL) or bounds.holds(value), str(bounds)

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "strategy", self.strategy in get_args(Strategy), f"one of {get_args(Strategy)}"
        samplers = SAMPLERS if self.samplers is None else self.samplers
        known = set(samplers) <= set(SAMPLERS) and len(set(samplers)) == len(samplers)
        yield "samplers", known and bool(samplers), f"some of {SAMPLERS}, each once"
        yield "stop", all(isinstance(s, str) and s for s in self.stop), "texts, none empty"
        stops = self.stop_token_ids
        few = len(stops) <= MAX_STOP_IDS and _ids(stops)
        yield "stop_token_ids", few, f"at most {MAX_STOP_IDS} token ids"
        for name in ("ignore_eos", "include_stop", "skip_special", "speculation"):
            yield name, isinstance(getattr(self, name), bool), "true or false"
        pairs = cast("tuple[tuple[int, float], ...]", self.logit_bias)
        low = float("-inf")
        numbers = all(v == low or RANGES["presence_penalty"].holds(v) for _, v in pairs)
        biased = [id for id, _ in pairs]
        yield "logit_bias", _ids(biased) and numbers, "token id -> -inf, or from -100 to 100"
        few = len({*biased, *self.banned_token_ids}) <= MAX_BIASED
        yield "logit_bias", few, f"at most {MAX_BIASED} ids, with the banned ones"
        yield "banned_token_ids", _ids(self.banned_token_ids), "token ids"
        allowed = self.allowed_token_ids
        yield "allowed_token_ids", allowed is None or (bool(allowed) and _ids(allowed)), "token ids"
        banned = {*self.banned_token_ids, *(id for id, bias in pairs if bias == low)}
        some = allowed is None or not _ids(allowed) or bool({*allowed} - banned)
        yield "allowed_token_ids", some, "ids of which not all are banned"
        least, most = self.min_tokens, self.max_tokens
        both = most is not None and RANGES["min_tokens"].holds(least)
        few = not both or not RANGES["max_tokens"].holds(most) or least <= cast("int", most)
        yield "min_tokens", few, f"at most max_tokens ({most})"
        words = self.bad_words
        yield "bad_words", all(isinstance(w, str) and w.strip() for w in words), "texts, none empty"
        sequences = all(0 < len(ids) <= MAX_BAD_LENGTH and _ids(ids) for ids in self.bad_words_ids)
        expected = f"sequences of at most {MAX_BAD_LENGTH} ids"
        yield "bad_words_ids", sequences, expected
        yield "bad_words_ids", len(self.bad_words_ids) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS}"
        breakers = self.dry_sequence_breakers
        right = all(is_id(b) or (isinstance(b, str) and b) for b in breakers)
        expected = f"at most {MAX_BREAKERS} texts or ids"
        yield "dry_sequence_breakers", right and len(breakers) <= MAX_BREAKERS, expected
        early = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        yield "early_stopping", early, 'true, false or "never"'
        yield "best_of", self.best_of is None or self.best_of >= self.n, f"at least n ({self.n})"
        plain = self.strategy not in ("fsd", "random_fsd", "contrastive", "beam", "greedy")
        yield "mirostat", not self.mirostat or plain, f'0 with the strategy "{self.strategy}"'
        yield from self._structure()

    def _structure(self) -> Iterable[tuple[str, bool, str]]:
        choice = self.choice
        texts = choice is None or (bool(choice) and all(isinstance(c, str) and c for c in choice))
        yield "choice", texts, "texts, none empty"
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            yield name, value is None or (isinstance(value, str) and bool(value)), "a text"
        schema = self.json_schema
        yield "json_schema", schema is None or isinstance(schema, (str, Mapping, bool)), "a schema"
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            yield given[1], False, f"left out beside {given[0]}"

    @property
    def constrained(self) -> bool:
        """Whether the answer has to be something."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def draws(self) -> bool:
        """Whether chance takes part."""
        if self.strategy == "random_fsd":
            return True
        if self.strategy in _SURE or self.temperature == 0:
            return False
        return self.strategy != "auto" or self.temperature is not None or self._filtered

    @property
    def _filtered(self) -> bool:
        return bool(
            self.top_k
            or self.mirostat
            or min(self.top_p, self.typical_p, self.tfs_z) < 1.0
            or max(self.min_p, self.top_a, self.top_n_sigma, self.xtc_probability) > 0.0
        )

    @property
    def scale(self) -> float:
        """What the logits are divided by where the chain has a temperature."""
        asked = 1.0 if self.temperature is None else self.temperature
        return max(asked, _COLDEST) if self.strategy in ("fsd", "random_fsd") else asked

    @property
    def drawing_temperature(self) -> float:
        """The temperature to draw with; 0 where nothing is drawn."""
        return self.scale if self.draws else 0.0


def _ids(values: Iterable[Any]) -> bool:
    return all(map(is_id, values))


def _each(name: str, expected: str, make: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    try:
        return tuple(make(value) for value in values)
    except (TypeError, ValueError):
        raise RequestError(f"{name} must be {expected}, not {show(values)}") from None


def _pair(pair: Any) -> tuple[Any, Any]:
    """An id and its bias; JSON has texts as keys."""
    id, value = pair
    return int(id) if isinstance(id, str) and id.isdecimal() else id, value
