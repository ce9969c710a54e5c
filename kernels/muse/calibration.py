"""Which layers and heads can do with MuSe: measured on the user's own text, chosen under a budget.

A few layers with sharp retrieval heads carry nearly all the loss of an approximation (our measurement on SmolLM2-135M), so
one setting for all layers is a poor bargain. Here every layer and key head is measured once, on exact inputs; a threshold on
the error then says which heads stay exact, and the threshold is the largest whose *measured* loss keeps to the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfplug import ConfigError
from hfplug.attention import AttentionCall
from hfplug.errors import nearest
from hfplug.kernels.muse.backend import approximate, configure, left_to_exact, observed
from hfplug.kernels.muse.config import LAYER_OPTIONS, MuSeConfig
from hfplug.options import build, coerce
from hfplug.probing import evaluating
from hfplug.seams.attention import attention_modules, options_of

logger = logging.getLogger(__name__)

SETTINGS: dict[str, dict[str, int]] = {
    "speed": {"clusters": 32, "query_clusters": 32},
    "default": {},
    "quality": {"clusters": 128, "query_clusters": 32},
}
"""What is tried in a layer, as differences from the model's options."""

_STEPS = 6  # halvings of the list of thresholds: each costs one forward pass over the texts


@dataclass
class LayerPlan:
    """What one layer does.

    Attributes:
        layer: its index.
        setting: name of the setting, or ``"exact"``.
        exact_heads: key heads that stay exact although the layer does not.
        error: setting -> per key head ``||o - o*||^2 / ||o*||^2``, on exact inputs.
        ratio: setting -> time of exact attention over that of the setting, all heads on it.
    """

    layer: int
    setting: str
    exact_heads: list[int]
    error: dict[str, list[float]]
    ratio: dict[str, float]


@dataclass
class Plan:
    """What :func:`calibrate` found.

    Attributes:
        layers: one entry per layer that MuSe could take.
        budget: what was allowed.
        measure: what the budget bounds: ``"loss"`` or ``"error"``.
        exact_loss: mean loss in nats per token with exact attention.
        loss: the same with the plan.
        tokens: tokens of each text.
        options: arguments of :func:`hfplug.kernels.muse.configure`.
    """

    layers: list[LayerPlan]
    budget: float
    measure: str
    exact_loss: float
    loss: float
    tokens: list[int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def on_muse(self) -> int:
        """Number of layers where at least one head is approximated."""
        return sum(layer.setting != "exact" for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Estimated time of exact attention over that of the plan, all layers."""
        exact = cost = 0.0
        for layer in self.layers:
            heads = len(next(iter(layer.error.values())))
            left = len(layer.exact_heads) / heads
            exact += 1.0
            cost += 1.0 if layer.setting == "exact" else left + (1 - left) / layer.ratio[layer.setting]
        return exact / cost if cost else 1.0

    def apply(self, model: nn.Module) -> Any:
        """Configure a model by the plan; returns the ledger, whose ``undo()`` takes it back."""
        return configure(model, **self.options)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: not such a file.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            layers = [build(LayerPlan, layer, f"layers[{i}]") for i, layer in enumerate(stored["layers"])]
            plan: Plan = build(cls, {**stored, "layers": layers})
            build(MuSeConfig, {"layers": None, **plan.options}, "options")
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"path={str(path)!r} is not a plan of MuSe: {error}") from error
        for layer in layers:
            if layer.setting not in (known := ("exact", *layer.error)):
                wrong = f"setting {layer.setting!r} of layer {layer.layer} is not one of {known}"
                raise ConfigError(f"path={str(path)!r} is not a plan of MuSe: {wrong}")
        return plan

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'setting':8} {'exact key heads':16} {'error of the worst head on it':>30}"]
        for layer in self.layers:
            on = [e for head, e in enumerate(layer.error.get(layer.setting, [])) if head not in layer.exact_heads]
            worst = f"{max(on):.4f}" if on else ""
            lines.append(f"{layer.layer:5d}  {layer.setting:8} {','.join(map(str, layer.exact_heads)):16} {worst:>30}")
        lines.append(
            f"{self.on_muse} of {len(self.layers)} layers on MuSe; loss {self.exact_loss:.4f} -> {self.loss:.4f} "
            f"({100 * math.expm1(self.loss - self.exact_loss):+.2f} % perplexity); attention about {self.ratio:.2f} times as fast"
        )
        return "\n".join(lines)


def calibrate(
    model: nn.Module,
    texts: Sequence[str | Tensor],
    budget: float = 0.01,
    *,
    measure: Literal["loss", "error"] = "loss",
    tokenizer: Any = None,
    settings: Mapping[str, Mapping[str, int]] = SETTINGS,
    verbose: bool = True,
) -> Plan:
    """Measure every layer and key head on texts and choose what runs on MuSe.

    Args:
        model: a causal language model on ``attn_implementation="muse"``. It is left as it was; :meth:`Plan.apply` changes it.
        texts: strings, or token ids ``(tokens,)`` or ``(1, tokens)``; of the kind and length the model will be used for, each at
            least ``min_length`` tokens.
        budget: nats per token the loss may rise by (``measure="loss"``; 0.01 is 1 % of perplexity), or the relative squared
            error a key head may have (``"error"``). It is kept on these texts; on others the loss may rise more.
        measure: what the budget bounds.
        tokenizer: needed for strings.
        settings: name -> options of layers to try, as differences from those each layer has. One that is slower than exact
            attention is not chosen. Layers and heads that the model's options leave to exact attention stay there.
        verbose: print the plan.

    Returns:
        The plan. With ``"loss"`` it is the boldest of a list of thresholds that was measured to keep to the budget.

    Raises:
        ConfigError: the model is not on MuSe, a text is too short, or an argument is wrong.
    """
    if measure not in ("loss", "error"):
        raise ConfigError(f"measure={measure!r} must be 'loss' or 'error'{nearest(str(measure), ('loss', 'error'))}")
    budget = coerce(budget, float, "budget")
    if not (budget > 0 and math.isfinite(budget)):
        raise ConfigError(f"budget={budget!r} must be a number > 0")
    layers = [m for _, m in attention_modules(model) if getattr(m.config, "_attn_implementation", None) == "muse"]
    if not layers:
        raise ConfigError("model is not on MuSe; load it with attn_implementation='muse', or model.set_attn_implementation(…)")
    base: MuSeConfig = options_of(layers[0].config, "muse")
    tried = _settings(base, settings)
    if isinstance(texts, (str, Tensor)) or not isinstance(texts, Sequence):
        raise ConfigError(f"texts must be a list of strings or tensors, not {type(texts).__name__}")
    ids = [_ids(text, tokenizer, base, i) for i, text in enumerate(texts)]
    if not ids:
        raise ConfigError("texts is empty; at least one text is needed")

    measured = _Measured(tried)
    with observed(measured):
        exact_loss = _loss(model, ids)
    found = measured.layers()
    if not found:
        raise ConfigError("no layer made a call that MuSe could take (sliding windows in all of them?)")

    def plan(threshold: float) -> Plan:
        chosen = [_choose(layer, threshold) for layer in found]
        overrides = {str(layer.layer): _override(layer, base, tried) for layer in chosen}
        options = {**_given(base), "layers": base.layers | {k: v for k, v in overrides.items() if v}}
        return Plan(chosen, budget, measure, exact_loss, math.nan, [x.shape[1] for x in ids], options)

    best = plan(budget) if measure == "error" else None
    if best is not None:
        best.loss = _loss_with(model, best, ids)
    else:
        best = _boldest(plan, found, exact_loss + budget, lambda p: _loss_with(model, p, ids))
    if verbose:
        print(best)  # noqa: T201  (what the caller asked for)
    return best


def _boldest(plan: Any, found: list[LayerPlan], limit: float, loss: Any) -> Plan:
    """Bisection over the errors that were measured: the largest threshold found whose loss keeps to the limit."""
    thresholds = sorted({e for layer in found for errors in layer.error.values() for e in errors if math.isfinite(e)})
    best: Plan = plan(0.0)  # everything exact
    best.loss = best.exact_loss
    low, high = 0, len(thresholds)  # the first `low` thresholds are known to be fine
    for _ in range(_STEPS):
        if low >= high:
            break
        middle = (low + high) // 2
        tried = plan(thresholds[middle])
        tried.loss = loss(tried)
        logger.info("muse: errors up to %.4f: loss %.4f, %d layers", thresholds[middle], tried.loss, tried.on_muse)
        if tried.loss <= limit:
            best, low = tried, middle + 1
        else:
            high = middle
    return best


class _Measured:
    """Stands in MuSe's place: gives the exact output and notes what each setting would have given, and its time."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.settings = settings
        self.error: dict[tuple[int, str], Tensor] = {}
        self.size: dict[int, Tensor] = {}
        self.exact_heads: dict[int, list[int]] = {}
        self.time: dict[tuple[int, str], float] = {}
        self.warm: set[Any] = set()

    def __call__(self, call: AttentionCall, config: MuSeConfig) -> tuple[Tensor, Tensor | None]:
        own, exact, heads = config.at(call.layer_idx)
        if call.layer_idx is None or left_to_exact(call, own) is not None:
            return call.exact()
        layer = call.layer_idx
        if exact:
            return call.exact()
        (out, weights), took = self._timed("exact", call, call.exact)
        groups = call.key.shape[1]
        self.exact_heads[layer] = sorted(heads)
        self.size[layer] = self.size.get(layer, 0) + _per_group(out, groups)
        self._took(layer, "exact", took)
        for name, change in self.settings.items():
            run = functools.partial(approximate, call, dataclasses.replace(own, **change))
            found, took = self._timed(name, call, run)
            self._took(layer, name, took)
            self.error[layer, name] = self.error.get((layer, name), 0) + _per_group(found - out, groups)
        return out, weights

    def _timed(self, name: str, call: AttentionCall, run: Callable[[], Any]) -> tuple[Any, float]:
        """What ``run`` returns and the seconds it took, after a first time that does not count (kernels are compiled then)."""
        kind = (name, call.query.shape, call.query.dtype)
        if kind not in self.warm:
            self.warm.add(kind)
            run()
        _wait(call.query.device)
        began = time.perf_counter()
        found = run()
        _wait(call.query.device)
        return found, time.perf_counter() - began

    def _took(self, layer: int, name: str, seconds: float) -> None:
        self.time[layer, name] = self.time.get((layer, name), 0.0) + seconds

    def layers(self) -> list[LayerPlan]:
        # One call is too short to time a layer by: all layers do the same work, so the ratio is that of their sums.
        total = {name: sum(t for (_, n), t in self.time.items() if n == name) for name in ("exact", *self.settings)}
        ratio = {name: total["exact"] / total[name] for name in self.settings} if self.time else {}
        return [
            LayerPlan(layer, "exact", self.exact_heads[layer],
                      {n: _relative(self.error[layer, n], size) for n in self.settings}, dict(ratio))
            for layer, size in sorted(self.size.items())
        ]  # fmt: skip


def _relative(error: Tensor, size: Tensor) -> list[float]:
    """``error / size``; a head that gives nothing and is approximated by nothing has no error."""
    return torch.where((error == 0) & (size == 0), 0.0, error / size).tolist()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _per_group(out: Tensor, groups: int) -> Tensor:
    """Squared norm per key head of ``(batch, tokens, heads, dim)``."""
    return out.double().square().sum((0, 1, 3)).view(groups, -1).sum(1)


def _choose(layer: LayerPlan, threshold: float) -> LayerPlan:
    """The cheapest setting when heads above the threshold are exact, and those that are to be in any case."""
    best, cost = dataclasses.replace(layer, setting="exact", exact_heads=[]), 1.0
    for name, errors in layer.error.items():
        left = [head for head, e in enumerate(errors) if head in layer.exact_heads or not e <= threshold]
        share = len(left) / len(errors)
        now = share + (1 - share) / layer.ratio[name]
        if now < cost:
            best, cost = dataclasses.replace(layer, setting=name, exact_heads=left), now
    return best


def _override(layer: LayerPlan, base: MuSeConfig, settings: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    if layer.setting == "exact":
        return {"exact": True}
    own = base.layers.get(str(layer.layer), {})
    kept = {name: value for name, value in own.items() if name in LAYER_OPTIONS}
    return {**kept, **settings[layer.setting], **({"exact_heads": layer.exact_heads} if layer.exact_heads else {})}


def _given(base: MuSeConfig) -> dict[str, Any]:
    return {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if f.name != "layers"}


def _settings(base: MuSeConfig, settings: Any) -> dict[str, dict[str, int]]:
    if not isinstance(settings, Mapping) or not settings:
        raise ConfigError(f"settings={settings!r} must map at least one name to options of layers {LAYER_OPTIONS}")
    if "exact" in settings:
        raise ConfigError("settings: the name 'exact' is taken")
    for name, change in settings.items():
        where = f"settings[{name!r}]"
        if not isinstance(change, Mapping):
            raise ConfigError(f"{where}={change!r} must be a mapping")
        for option in change:
            if option not in LAYER_OPTIONS:
                close = nearest(str(option), LAYER_OPTIONS)
                raise ConfigError(f"{where}: {option!r} is not an option of layers{close}; known: {LAYER_OPTIONS}")
        build(MuSeConfig, {**_given(base), **change}, where)
    return {str(name): dict(change) for name, change in settings.items()}


def _ids(text: str | Tensor, tokenizer: Any, base: MuSeConfig, index: int) -> Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError(f"texts[{index}] is a string; tokenizer= is needed")
        text = tokenizer(text, return_tensors="pt").input_ids
    if not isinstance(text, Tensor) or text.is_floating_point() or text.dtype == torch.bool:
        got = f"{text.dtype}" if isinstance(text, Tensor) else type(text).__name__
        raise ConfigError(f"texts[{index}] must be a string or a tensor of token ids, not {got}")
    if text.dim() not in (1, 2) or (text.dim() == 2 and text.shape[0] != 1):
        raise ConfigError(f"texts[{index}] of shape {tuple(text.shape)} must be (tokens,) or (1, tokens): one text each")
    ids = text.reshape(1, -1)
    need = max(base.min_length, 2 * base.block + 1)
    if ids.shape[1] < need:
        raise ConfigError(f"texts[{index}] has {ids.shape[1]} tokens; MuSe is used from {need} on (min_length and 2 block)")
    return ids


def _loss_with(model: nn.Module, plan: Plan, ids: list[Tensor]) -> float:
    with plan.apply(model):
        return _loss(model, ids)


@torch.no_grad()
def _loss(model: nn.Module, ids: list[Tensor]) -> float:
    """Mean loss per token over all texts."""
    total, count = 0.0, 0
    device = next(model.parameters()).device
    with evaluating(model):
        for row in ids:
            row = row.to(device)  # noqa: PLW2901
            total += float(model(input_ids=row, labels=row, use_cache=False).loss) * (row.shape[1] - 1)
            count += row.shape[1] - 1
    return total / count
