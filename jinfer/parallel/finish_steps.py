"""Pipeline parallelism, last part of a step: results from the last stage's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner import search_steps
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.sampling.logprobs import log_probabilities

type Outputs = Mapping[str, Array]


def finish_forward(want: Want) -> Callable[[Outputs], Array]:
    """The result of `steps.forward`."""
    return lambda out: out[want].astype(jnp.float32)


def finish_score(out: Outputs, following: Array) -> Any:
    """The results of `steps.score`."""
    return log_probabilities(out["logits"].astype(jnp.float32), following)


def finish_beam(model: AbstractModel) -> Callable[[Outputs, Array], Any]:
    """The results of `steps.beam`, from the logits and the beams' scores."""

    def finish(out: Outputs, scores: Array) -> Any:
        return search_steps.best_beams(model, out["logits"].astype(jnp.float32), scores)

    return finish


def finish_contrastive(model: AbstractModel) -> Callable[..., Any]:
    """The results of `steps.contrastive`, from logits and hidden states."""

    def finish(out: Outputs, length: Array, past: Array, probabilities: Array, alpha: Array) -> Any:
        return search_steps.best_candidate(model, out, length, past, probabilities, alpha)

    return finish
