"""Merging eight LoRA adapters of rank 16 on 2048 x 2048 modules: time and error against PEFT's ``add_weighted_adapter``.

Expected, written before measuring: ``ctm`` at least 50 times as fast as PEFT's ``combination_type="svd"`` (which decomposes
the full 2048 x 2048 sum), on one thread; ``svd_merge`` faster still. Of the errors per task, ``‖merged - dW_t‖ / ‖dW_t‖`` with
weights 1/T, no expectation is set for the mean; ctm should keep more of the task that is kept least (energy) than the truncated
sum does, and be further from the sum. PEFT's linear and ties work on A and B by themselves and should be worst.

Two kinds of adapters, both random: "related" share part of their subspaces, with singular values falling to a hundredth and norms
from 1 to 3, as trained adapters look; "unrelated" have flat spectra and nothing in common, where any rank-16 result loses most of
them and the subspaces take the most iterations. Time: one module, whole verbs (adapters of a model in memory to a new adapter,
ours with its report, both with PEFT's work of injecting it), taken in turn, median of the ratios of neighbours in time.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import _bench
import peft
import torch
from torch import Tensor, nn

import hfplug

METHODS = ("ctm", "svd_merge")

TASKS, R, SIZE, TARGET = 8, 16, 2048, 50.0
NAMES = [f"task_{i}" for i in range(TASKS)]
PEFTS = {"peft svd": {"combination_type": "svd", "svd_rank": R}, "peft linear": {"combination_type": "linear"},
         "peft ties": {"combination_type": "ties", "density": 0.25}}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "ctm": {"method": "ctm"}, "ctm ties": {"method": "ctm", "rule": "ties"}, "svd_merge": {"method": "svd_merge"},
}  # fmt: skip


class Base(nn.Module):
    """One linear module; its weight plays no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE, bias=False)


def factors(kind: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """``A`` ``(R, SIZE)`` and ``B`` ``(SIZE, R)`` of every task."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    common, out = (randn(SIZE, R), randn(R, SIZE)), []
    for task in range(TASKS):
        B, A, scale = randn(SIZE, R), randn(R, SIZE), 1.0
        if kind == "related":
            B = (0.5 * common[0] @ randn(R, R) / R**0.5 + 0.5 * B) * torch.logspace(0, -2, R)
            A, scale = 0.5 * randn(R, R) @ common[1] / R**0.5 + 0.5 * A, 3 ** (task / (TASKS - 1))
        out.append((A, B * (scale / torch.linalg.matrix_norm(B @ A))))
    return out


def model_of(pairs: list[tuple[Tensor, Tensor]]) -> peft.PeftModel:
    """A model with one adapter per task, scaling 1."""
    config = peft.LoraConfig(r=R, lora_alpha=R, target_modules=["layer"])
    model = peft.get_peft_model(Base(), config, NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        for name, (A, B) in zip(NAMES, pairs, strict=True):
            model.base_model.model.layer.lora_A[name].weight.copy_(A)
            model.base_model.model.layer.lora_B[name].weight.copy_(B)
    return model


def merge(model: peft.PeftModel, how: str, weights: list[float]) -> Any:
    """Add the adapter "merged"."""
    if how in PEFTS:
        return model.add_weighted_adapter(NAMES, weights, "merged", **PEFTS[how])
    return hfplug.tuners.merge(NAMES, weights, R, model=model, **OURS[how])


def errors(model: peft.PeftModel, how: str) -> dict[str, Any]:
    """Per-task error and energy of the result, in float64 at full size."""
    weights = [1 / TASKS] * TASKS
    report = merge(model, how, weights)
    layer = model.base_model.model.layer
    deltas = [layer.get_delta_weight(name).double() for name in NAMES]
    merged = layer.get_delta_weight("merged").double()
    U, V = (torch.linalg.qr(m.double()).Q for m in (layer.lora_B["merged"].weight, layer.lora_A["merged"].weight.T))
    total = sum(w * d for w, d in zip(weights, deltas, strict=True))
    norm = torch.linalg.matrix_norm
    off = [(norm(merged - d) / norm(d)).item() for d in deltas]
    kept = [(norm(U.T @ d @ V) / norm(d)).item() for d in deltas]
    model.delete_adapter("merged")
    return {
        "task_error": {"worst": max(off), "mean": statistics.mean(off)},
        "energy": {"worst": min(kept), "mean": statistics.mean(kept)},
        "error_to_the_sum": (norm(merged - total) / norm(total)).item(),
        "iterations": getattr(report, "modules", [None])[0].iterations if report is not None else None,
    }


def measure(kind: str, repeats: int) -> dict[str, Any]:
    """One kind of adapters: times in turn, then errors of everything."""
    model = model_of(factors(kind, 0))
    runs = {}
    for how in ("peft svd", "ctm", "svd_merge"):

        def run(how: str = how) -> None:
            merge(model, how, [1 / TASKS] * TASKS)
            model.delete_adapter("merged")

        runs[how] = run
    times = _bench.interleave(runs, repeats)
    speed = {how: _bench.ratios(times["peft svd"].wall, times[how].wall) for how in ("ctm", "svd_merge")}
    found = {
        "seconds": {how: _bench.summary(t.wall) for how, t in times.items()},
        "times_as_fast_as_peft_svd": speed,
        "target_reached": speed["ctm"]["median"] >= TARGET,
        "quality": {how: errors(model, how) for how in (*OURS, *PEFTS)},
    }
    print(f"{kind}: " + ", ".join(f"{how} {t['median']:.1f} x as fast as PEFT's svd" for how, t in speed.items()))
    for how, q in found["quality"].items():
        print(
            f"  {how:<17} task error worst {q['task_error']['worst']:.3f} mean {q['task_error']['mean']:.3f}; energy worst "
            f"{q['energy']['worst']:.3f} mean {q['energy']['mean']:.3f}; to the sum {q['error_to_the_sum']:.3f}"
        )
    return found


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    fast = [result[kind]["times_as_fast_as_peft_svd"]["ctm"] for kind in ("related", "unrelated")]
    kept = [
        [result[kind]["quality"][how]["energy"]["worst"] for how in ("ctm", "svd_merge")] for kind in ("related", "unrelated")
    ]
    return _bench.ResultRow(
        f"at least {TARGET:g} times as fast as PEFT's svd merge; keeps more of the task kept least than the truncated sum",
        "better than merging first and truncating then, on accuracy; the factor is a limit of our own",
        f"{fast[0]['median']:.1f} and {fast[1]['median']:.1f} times as fast (related, unrelated adapters); energy of the task "
        + "kept least "
        + ", ".join(f"{a:.2f} against {b:.2f}" for a, b in kept),
        "partly reproduced" if min(f["median"] for f in fast) < TARGET else "reproduced",
    )


def main() -> None:
    """Measure and write ``results/ctm.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*keep less than")
    settings = {"tasks": TASKS, "r": R, "size": SIZE, "modules": 1, "repeats": options.repeats, "target": TARGET}
    result = {kind: measure(kind, options.repeats) for kind in ("related", "unrelated")}
    print(_bench.write("ctm", {"settings": settings, **result}, results_row))


if __name__ == "__main__":
    main()
