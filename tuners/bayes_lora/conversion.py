"""A trained LoRA made Bayesian after the fact, without training (TFB, arXiv 2412.05723)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.loras import LiveLora
from hfplug.lowrank import LowRank
from hfplug.tuners.bayes_lora.config import BayesLoraConfig
from hfplug.tuners.bayes_lora.layer import BayesLoraLinear
from hfplug.tuners.bayes_lora.posterior import posterior

_EPS = 1e-6  # as in TFB: sigma of a direction that B does not use stays finite


def from_lora(
    model: Any,
    anchors: Iterable[Mapping[str, Any]] | None = None,
    *,
    adapter_name: str = "default",
    sigma: float | None = None,
    tolerance: float = 0.01,
    samples: int = 4,
    iterations: int = 12,
) -> Any:
    """Turn a trained LoRA into a bayes_lora adapter whose mean is that LoRA exactly.

    ``B = U·D·Vᵀ``, ``B' = U·D`` and ``A' = Vᵀ·A`` give the same product; row ``i`` of ``A'`` gets the standard deviation
    ``sigma / (D_i + 1e-6)``, so that every direction is disturbed alike, and ``sigma`` is the largest for which at most
    ``tolerance`` of the predictions on ``anchors`` change (bisection; TFB). No training, no gradient.

    Args:
        model: a ``PeftModel`` with a LoRA adapter on linear layers. It is consumed: its LoRA layers are taken out of the base
            model, which the result stands on.
        anchors: batches (keyword arguments of the forward) the choice of ``sigma`` is made on; unlabelled. The predictions
            compared are the arg-max of the logits at every position that ``attention_mask`` does not exclude.
        adapter_name: which LoRA.
        sigma: take this one instead of searching.
        tolerance: share of predictions that may change, in (0, 1).
        samples: weight samples per trial.
        iterations: steps of the bisection, each ``samples`` passes over the anchors.

    Returns:
        a ``PeftModel`` with a bayes_lora adapter of the same name, ``random_factors="A"``, in evaluation mode.

    Raises:
        ConfigError: neither ``sigma`` nor ``anchors``, a wrong value, or no such adapter.
        UnsupportedError: an adapter that is not a plain LoRA on linear layers.
    """
    import peft

    if (sigma is None) == (anchors is None):
        raise ConfigError("from_lora: give either anchors=, to choose sigma on, or sigma= itself")
    if sigma is not None and not sigma > 0:
        raise ConfigError(f"from_lora: sigma={sigma!r} must be > 0")
    if not 0 < tolerance < 1:
        raise ConfigError(f"from_lora: tolerance={tolerance!r} must be in (0, 1)")
    batches = None if anchors is None else list(anchors)
    if batches == []:
        raise ConfigError("from_lora: anchors is empty")
    for name, value in (("samples", samples), ("iterations", iterations)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"from_lora: {name}={value!r} must be an integer >= 1")
    updates = _lora_updates(model, adapter_name)
    if not any(bool(update.B.any()) for update in updates.values()):
        raise ConfigError("from_lora: every B is zero, so the adapter was never trained and no noise would change anything")
    with torch.no_grad():  # before the LoRA is taken out: a batch the model cannot take must leave it as it was
        if batches is not None and not sum(int(_counted(batch, model(**batch).logits).sum()) for batch in batches):
            raise ConfigError("from_lora: attention_mask excludes every position of the anchors")
    config, rank = model.peft_config[adapter_name], next(iter(updates.values())).rank
    made = BayesLoraConfig(
        r=rank, lora_alpha=rank, lora_dropout=config.lora_dropout, random_factors="A", kl_weight=0.0,
        task_type=config.task_type, target_modules=sorted(updates), modules_to_save=config.modules_to_save,
        base_model_name_or_path=config.base_model_name_or_path, revision=config.revision,
    )  # fmt: skip
    saved = {n: p.detach().clone() for n, p in model.named_parameters() if f".modules_to_save.{adapter_name}." in n}
    bayes = peft.get_peft_model(model.unload(), made, adapter_name=adapter_name)
    bayes.load_state_dict(saved, strict=False)
    layers = {m.key: m for m in bayes.modules() if isinstance(m, BayesLoraLinear)}
    directions: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for key, update in updates.items():
            u, d, vt = torch.linalg.svd(update.B, full_matrices=False)
            layer = layers[key]
            layer.bayes_lora_A[adapter_name].weight.copy_(vt @ update.A)
            layer.bayes_lora_B[adapter_name].weight.copy_(u * d)
            directions[key] = d
    bayes.eval()

    def spread(value: float) -> None:
        for key, layer in layers.items():
            rho = layer.bayes_lora_rho_A[adapter_name].rho
            d = directions[key]
            # What B does not use (rank patterns, padding) changes nothing, and 1e6 times any sigma overflows half precision.
            deviation = torch.where(d > _EPS * d.max(), value / (d + _EPS), 0.0).clamp(min=1e-30)[:, None].expand(rho.shape)
            # inverse of softplus: x + log(1 - exp(-x)), without loss at both ends
            rho.data.copy_(deviation + torch.log(-torch.expm1(-deviation)))

    if sigma is None:
        assert batches is not None
        sigma = _largest(spread, lambda: _changed(bayes, batches, samples), tolerance, iterations, directions)
    spread(sigma)
    return bayes


def _lora_updates(model: Any, adapter_name: str) -> dict[str, LowRank]:
    """The LoRA's update by module name, all of the largest rank there is."""
    configs = getattr(model, "peft_config", {})
    if adapter_name not in configs:
        raise ConfigError(f"from_lora: the model has no adapter {adapter_name!r}; it has {sorted(configs)}")
    kind = configs[adapter_name].peft_type
    if str(getattr(kind, "value", kind)) != "LORA":
        raise UnsupportedError(f"from_lora: adapter {adapter_name!r} is of type {kind}, not LORA")
    if len(configs) > 1:
        raise UnsupportedError(f"from_lora: the model has {len(configs)} adapters; delete all but {adapter_name!r}")
    # modules_to_save are carried over
    lora = LiveLora(model, adapter_name, f"from_lora: adapter {adapter_name!r}", apart=("modules_to_save",))
    rank = max(shape[0] for shape in lora.shapes.values())
    return {module: update.padded(rank) for module in lora.shapes if (update := lora.read(module)) is not None}


def _counted(batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """The predictions that count: those at real tokens, ``(batch, tokens)`` bool, or ``(batch,)`` of a classifier."""
    keep = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    mask = batch.get("attention_mask")
    return mask.bool().to(keep.device) if mask is not None and mask.shape == keep.shape else keep


@torch.no_grad()
def _changed(model: Any, batches: list[Mapping[str, Any]], samples: int) -> float:
    """Share of the mean's predictions that a sample changes."""
    changed = total = 0
    for batch in batches:
        with posterior(model, "mean"):
            logits = model(**batch).logits
        expected, keep = logits.argmax(-1), _counted(batch, logits)
        for index in range(samples):
            with posterior(model, index):
                changed += int(((model(**batch).logits.argmax(-1) != expected) & keep).sum())
            total += int(keep.sum())
    return changed / total


def _largest(
    spread: Callable[[float], None],
    changed: Callable[[], float],
    tolerance: float,
    iterations: int,
    directions: Mapping[str, torch.Tensor],
) -> float:
    """The largest sigma whose samples change at most ``tolerance`` of the predictions, by bisection of its logarithm."""
    top = max(float(d.max()) for d in directions.values())
    low, high = top * 1e-8, top * 1e3
    for _ in range(iterations):
        middle = math.sqrt(low * high)
        spread(middle)
        low, high = (middle, high) if changed() <= tolerance else (low, middle)
    return low
