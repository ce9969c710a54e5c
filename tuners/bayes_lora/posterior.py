"""Using the posterior: one coherent weight sample at a time, and what many of them say together."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.probing import evaluating
from hfplug.tuners.bayes_lora.layer import BayesLoraLinear
from hfplug.tuners.bayes_lora.state import ModelState


def _logits(output: Any) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.shape[-1] < 2:
        shape = None if logits is None else tuple(logits.shape)
        kind = type(output).__name__
        raise ConfigError(f"predictive: the model returned a {kind} with logits of shape {shape}; wanted (..., classes)")
    return logits


def _last(logits: torch.Tensor, mask: Any) -> torch.Tensor:
    if logits.dim() != 3:
        raise ConfigError(f"last_token=True needs logits (batch, tokens, vocabulary), not {tuple(logits.shape)}")
    if mask is None or tuple(mask.shape) != tuple(logits.shape[:2]):
        return logits[:, -1]
    positions = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(mask.bool().to(logits.device), positions, 0).amax(1)
    return logits[torch.arange(len(logits), device=logits.device), last]


def _state(model: nn.Module) -> ModelState:
    for module in model.modules():
        if isinstance(module, BayesLoraLinear) and module.bayes_lora_state is not None:
            return module.bayes_lora_state
    raise ConfigError(f"model={type(model).__name__} has no bayes_lora adapter, so it has no posterior to sample from")


def _check_samples(model: nn.Module) -> None:
    # Each of these would answer for every sample alike, which reads as certainty.
    for layer in (module for module in model.modules() if isinstance(module, BayesLoraLinear)):
        state = "merged" if layer.merged else "disabled" if layer.disable_adapters else None
        if state is None and not any(layer.holds(name) for name in layer.active_adapters):
            state = f"not active (active: {list(layer.active_adapters)})"
        if state is not None:
            raise ConfigError(f"the bayes_lora adapter is {state} at {layer.key!r}, so there are no samples to evaluate")
    if torch.is_grad_enabled() and any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise UnsupportedError(
            "posterior: under gradient checkpointing the weights are drawn again in backward, after the block has ended; turn "
            "checkpointing off, or use eval_mode='sample' and seed in the configuration"
        )


@contextlib.contextmanager
def posterior(model: nn.Module, sample: int | Literal["mean"]) -> Iterator[None]:
    """Evaluate one weight sample, whatever the configuration says, for as long as the block runs.

    Every forward inside meets the same weights: all tokens of a sequence, prefill and decoding steps, beams, a cache carried
    from one call to the next. One ``generate`` per block is one network's answer::

        for i in range(8):
            with hfplug.tuners.posterior(model, sample=i):
                answers.append(model.generate(**inputs))

    Args:
        model: a model with a bayes_lora adapter, however it was put in.
        sample: number of the sample (>= 0; with ``config.seed`` it is the seed), or ``"mean"``.

    Raises:
        ConfigError: the model has no bayes_lora adapter, it is merged or switched off, or ``sample`` is neither.
        UnsupportedError: training under gradient checkpointing.

    The choice is this thread's: another thread may evaluate another sample of the same model.
    """
    if sample != "mean":
        if isinstance(sample, bool) or not hasattr(sample, "__index__") or operator.index(sample) < 0:
            raise ConfigError(f"posterior: sample={sample!r} must be an integer >= 0, or 'mean'")
        sample = operator.index(sample)
    state = _state(model)
    if sample != "mean":
        _check_samples(model)
    former, state.chosen = state.chosen, sample
    try:
        yield
    finally:
        state.chosen = former


@dataclass(frozen=True)
class Predictive:
    """What ``samples`` networks say together. Entropies in nats; shapes without the last dimension of the logits.

    Attributes:
        mean_probabilities: ``(..., classes)``, the mean of the samples' probabilities, float32 or wider.
        predictive_entropy: entropy of that mean: all of the uncertainty.
        expected_entropy: mean of the samples' entropies: what more data would not remove (aleatoric).
        mutual_information: the difference, ``>= 0``: what the samples disagree about (epistemic).
        samples: how many.
    """

    mean_probabilities: torch.Tensor
    predictive_entropy: torch.Tensor
    expected_entropy: torch.Tensor
    mutual_information: torch.Tensor
    samples: int


def predictive(
    model: nn.Module, inputs: Mapping[str, Any], samples: int = 16, *, first_sample: int = 0, last_token: bool = False
) -> Predictive:
    """Run ``samples`` weight samples of a model over ``inputs`` and sum up their predictions.

    The model is run in evaluation mode, one sample at a time; the memory is that of one. The mode of the model, and torch's
    global generator, are left as they were.

    Args:
        model: a model with a bayes_lora adapter, whose output has ``logits``.
        inputs: keyword arguments of its forward.
        samples: number of weight samples, >= 1.
        first_sample: number of the first one.
        last_token: keep only the logits of each row's last real token (``(batch, tokens, vocabulary)`` is large).

    Raises:
        ConfigError: ``samples`` < 1, the model has no bayes_lora adapter that is active, or no logits.
        UnsupportedError: a head whose logits are not those of a softmax (regression, several labels).
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"predictive: samples={samples!r} must be an integer >= 1")
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem in ("regression", "multi_label_classification"):
        raise UnsupportedError(f"predictive: the head is one of {problem}; only logits of a softmax have these entropies")
    probabilities: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    with evaluating(model):
        for index in range(first_sample, first_sample + samples):
            with posterior(model, index):
                logits = _logits(model(**inputs))
            logits = _last(logits, inputs.get("attention_mask")) if last_token else logits
            p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
            entropy = torch.special.entr(p).sum(-1)
            probabilities = p if probabilities is None else probabilities + p
            entropies = entropy if entropies is None else entropies + entropy
    assert probabilities is not None
    assert entropies is not None
    mean, expected = probabilities / samples, entropies / samples
    total = torch.special.entr(mean).sum(-1)
    # Jensen's inequality makes it non-negative; rounding does not know that.
    information = (total - expected).clamp(min=0) if samples > 1 else torch.zeros_like(total)
    return Predictive(mean, total, expected, information, samples)
