"""Building a model from scratch, a warm start from a pretrained one, and what the paper says about learning rates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfplug import apply
from hfplug.errors import ConfigError
from hfplug.families import decoder_of
from hfplug.modeling_patches.simplenorm.layer import NormedConv1D, NormedLinear
from hfplug.patches import Patched


def build_simplenorm(config: Any, **options: Any) -> Any:
    """A causal language model with SimpleNorm, from scratch, with the authors' initialisation.

    Args:
        config: the configuration of a model of a known family; it is left as it is.
        options: fields of :class:`~hfplug.modeling_patches.SimpleNorm`.

    Returns:
        The model on the CPU, in training mode as transformers builds it; weights are drawn from torch's generator.
    """
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # the warning is for pretrained weights
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        apply(skeleton, "simplenorm", **options)
    return AutoModelForCausalLM.from_config(skeleton.config)


def lr_scale(base_lr: float, factor: float = 3.0) -> float:
    """A learning rate to try with SimpleNorm: ``factor`` times that of the same model with pre-norms.

    Advice only, nothing applies it. The paper trains 7B at 3.3 times and 1B at 10 times the baseline's global rate; there are
    no rates per parameter.

    Raises:
        ConfigError: a factor outside 1 to 10, which the paper does not speak about.
    """
    if not 1 <= factor <= 10:
        raise ConfigError(f"factor={factor!r} must be between 1 and 10; the paper reports 3.3 (7B) to 10 (1B)")
    return base_lr * factor


@torch.no_grad()
def warm_start(model: Any, batches: Iterable[Mapping[str, Tensor]], **options: Any) -> Patched:
    """Apply SimpleNorm to a pretrained model and set the gains so that each output feature keeps its size.

    A start for retraining and no more (our reading): per token every activation changes. The gain of a feature is its RMS
    before the patch over its RMS after the norm, over the real tokens of ``batches``, layer after layer.

    Args:
        model: a pretrained model without the patch.
        batches: calibration inputs of the model: ``input_ids`` ``(batch, tokens)`` and perhaps ``attention_mask``.
        options: fields of :class:`~hfplug.modeling_patches.SimpleNorm`; ``affine`` stays ``True``.

    Raises:
        ConfigError: no batches, or ``affine=False``.
    """
    kept = [dict(batch) for batch in batches]
    if not kept:
        raise ConfigError("batches is empty; a warm start needs text of the kind the model is for")
    if options.get("affine") is False:
        raise ConfigError("affine=False leaves no gains to set")
    before = _sizes(model, kept, {path: linear for _, path, linear in _projections(model)})
    handle = apply(model, "simplenorm", **options)
    try:
        order = [(path, m) for _, path, m in _projections(model) if isinstance(m, (NormedLinear, NormedConv1D))]
        for index in range(len(decoder_of(model).layers)):  # what comes later sees gains that are set
            here = {path: m for path, m in order if decoder_of(model).layer_of(path) == index}
            for _ in range(4):  # q, k, v; then o, which sees v; then gate and up, which see o; then down
                after = _sizes(model, kept, here)
                for path, module in here.items():
                    gain = module.norm.weight
                    if gain is not None:
                        gain.mul_((before[path] / after[path].clamp_min(1e-12)).to(gain.dtype))
    except BaseException:
        handle.remove()  # a model with half of its gains set is of no use to anyone
        raise
    return handle


def _projections(model: Any) -> Iterable[tuple[int, str, Any]]:
    decoder = decoder_of(model)
    for index in range(len(decoder.layers)):
        for path, linear, _ in decoder.projections(index):
            yield index, path, linear


def _sizes(model: Any, batches: list[dict[str, Tensor]], modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """RMS of each output feature of some modules, over the real tokens."""
    from hfplug.probing import evaluating

    sums = {path: torch.zeros((), dtype=torch.float64) for path in modules}
    tokens = 0
    mask: Tensor | None = None

    def collect(path: str, output: Tensor) -> None:
        flat = output.double().square()
        flat = flat.flatten(0, -2) if mask is None else flat[mask]
        sums[path] = sums[path].to(flat.device) + flat.sum(0)

    handles = [
        module.register_forward_hook(lambda m, args, output, path=path: collect(path, output)) for path, module in modules.items()
    ]
    try:
        with evaluating(model):
            for batch in batches:
                found = batch.get("attention_mask")
                mask = None if found is None else found.bool()
                tokens += int(batch["input_ids"].numel() if mask is None else mask.sum())
                model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {path: (total / max(tokens, 1)).sqrt() for path, total in sums.items()}


__all__ = ["build_simplenorm", "lr_scale", "warm_start"]
