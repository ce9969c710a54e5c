"""What a merge of adapters reports: how far each module's result is from the exact weighted sum, and what each adapter kept."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENERGY_BOUND = 0.5
"""Below this share of an adapter's norm a merge warns."""
EXACT = 1e-6
"""Below this error a module is its sum but for float32: what is not in it cancelled, and no rank would keep more."""


@dataclass(frozen=True)
class ModuleReport:
    """One module.

    Attributes:
        module: its name in the base model.
        rank: rank of the result, before zeros are added to make all modules alike.
        error: ``‖result - sum w_t·dW_t‖ / ‖sum w_t·dW_t‖`` (Frobenius), of the factors as written, in float32. Where the
            updates cancel to rounding, relative to the sum of ``|w_t|·‖dW_t‖`` instead.
        least_error: the least that any update of this rank can have (Eckart and Young), relative as ``error``.
        energy: per adapter ``‖Uᵀ·dW_t·V‖ / ‖dW_t‖``, the share of its norm inside the merged subspaces; ``None``: no update here.
        iterations: iterations of the method; ``None``: it has none.
        errors: ``error`` before it was divided, and what it was divided by.
    """

    module: str
    rank: int
    error: float
    least_error: float
    energy: tuple[float | None, ...]
    iterations: int | None
    errors: tuple[float, float]


@dataclass(frozen=True)
class MergeReport:
    """A whole merge.

    Attributes:
        method: the merge method.
        options: its options.
        adapters: how the merged adapters are called.
        weights: one per adapter.
        rank: rank of every module of the result.
        modules: one report per module, in name order.
        output: the folder written, ``None``: none.
        name: the adapter added to a model, ``None``: none.
        notes: what a reader must know.
    """

    method: str
    options: dict[str, Any]
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    rank: int
    modules: tuple[ModuleReport, ...]
    output: Path | None
    name: str | None
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Relative error of all modules together: root of the summed squares over that of the sums."""
        off = sum(m.errors[0] ** 2 for m in self.modules) ** 0.5
        size = sum(m.errors[1] ** 2 for m in self.modules) ** 0.5
        return off / size if size else 0.0

    @property
    def worst(self) -> ModuleReport:
        """The module with the largest error."""
        return max(self.modules, key=lambda m: m.error)

    @property
    def mean_error(self) -> float:
        """Mean of the modules' errors."""
        return sum(m.error for m in self.modules) / len(self.modules)

    def energy(self, adapter: int) -> tuple[float, float] | None:
        """Least and mean energy kept of one adapter over the modules it adapts; ``None``: all its updates are zero."""
        kept = [e for m in self.modules if (e := m.energy[adapter]) is not None]
        return (min(kept), sum(kept) / len(kept)) if kept else None

    def low(self) -> Iterator[str]:
        """A sentence for every adapter of which some module kept less than :data:`ENERGY_BOUND`."""
        for at, (label, weight) in enumerate(zip(self.adapters, self.weights, strict=True)):
            lossy = [m for m in self.modules if m.error > EXACT]
            kept = [(e, m.module) for m in lossy if (e := m.energy[at]) is not None and e < ENERGY_BOUND]
            if kept and weight:
                energy, module = min(kept)
                yield (
                    f"{len(kept)} of {len(self.modules)} modules keep less than {ENERGY_BOUND:.0%} of {_short(label)} "
                    f"(least: {energy:.1%} in {module}); a larger rank keeps more"
                )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        out = dataclasses.asdict(self)
        out["output"] = None if self.output is None else str(self.output)
        out["options"] = {k: v if isinstance(v, (int, float, str)) else repr(v) for k, v in self.options.items()}
        for module in out["modules"]:
            del module["errors"]
        return {**out, "error": self.error, "worst_error": self.worst.error, "mean_error": self.mean_error}

    def __str__(self) -> str:
        width = max(6, *(len(m.module) for m in self.modules))
        lines = [
            f"{self.method}: {len(self.adapters)} adapters -> one LoRA of rank {self.rank} on {len(self.modules)} modules",
            f"error against the exact weighted sum: {self.error:.3g} over all modules, {self.mean_error:.3g} in the mean, "
            f"{self.worst.error:.3g} at worst ({self.worst.module})",
            "",
            f"{'module':<{width}}  rank     error     least  energy kept, least to most  iterations",
        ]
        for m in self.modules:
            kept = sorted(e for e in m.energy if e is not None)
            energy = f"{kept[0]:.3f} to {kept[-1]:.3f}" if kept else "-"
            count = "-" if m.iterations is None else m.iterations
            lines.append(f"{m.module:<{width}}  {m.rank:>4}  {m.error:>8.2e}  {m.least_error:>8.2e}  {energy:<27}  {count:>10}")
        lines.append("")
        for at, (label, weight) in enumerate(zip(self.adapters, self.weights, strict=True)):
            found = self.energy(at)
            energy = "no update" if found is None else f"energy kept {found[0]:.3f} at least, {found[1]:.3f} in the mean"
            lines.append(f"weight {weight:g}: {_short(label)}: {energy}")
        lines += [*(f"note: {n}" for n in self.notes), *(f"warning: {w}" for w in self.low())]
        written = [f"written to {self.output}"] if self.output else [f"added as adapter {self.name!r}"] if self.name else []
        return "\n".join([*lines, *written])


def _short(label: str) -> str:
    """A label with its hash cut to what a reader can compare."""
    return re.sub(r"(sha256=\w{12})\w+", r"\1…", label)
