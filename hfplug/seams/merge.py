"""Merging: several trained LoRA adapters into one, of weights alone.

A merge method says how the updates of *one* module become one update (:class:`MergeMethod`). Everything around it is here:
which adapters can be merged, PEFT's scaling, one module after the other, the error of the result against the exact weighted
sum, and writing a plain PEFT LoRA with a scaling of exactly 1. Base weights are neither read nor changed, so a quantised or a
tied base is no matter: an ``lm_head`` is merged as any other linear module.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
from torch import Tensor

from hfplug import artefacts
from hfplug.errors import ConfigError
from hfplug.loras import FolderLora, LiveLora, Lora, write_lora
from hfplug.lowrank import CoreSpace, LowRank
from hfplug.merge_report import MergeReport, ModuleReport
from hfplug.method import Kind
from hfplug.options import build
from hfplug.plugins import Entry, catalogue, load

_CANCELLED = 1e-13  # a sum this small against its parts is the rounding of updates that cancel


@dataclass(frozen=True)
class Merged:
    """What a method makes of one module.

    Attributes:
        update: the merged update, float64; its rank may be less than asked for.
        basis: ``U`` ``(out, k)`` and ``V`` ``(in, k)``, orthonormal columns: the subspaces the result was sought in.
        iterations: how many the method needed, if it iterates.
    """

    update: LowRank
    basis: tuple[Tensor, Tensor]
    iterations: int | None = None


class MergeMethod(Protocol):
    """A merge method: ``Method.target`` of kind ``merge``, built with its configuration (a dataclass)."""

    def __init__(self, config: Any) -> None: ...

    def default_rank(self, ranks: Sequence[int]) -> int | None:
        """The rank where the user names none, from the ranks of all modules of all adapters; ``None``: each module its own."""
        ...

    def merge(
        self,
        updates: Sequence[LowRank | None],
        space: CoreSpace,
        weights: Sequence[float],
        rank: int | None,
        generator: torch.Generator,
    ) -> Merged:
        """Merge the updates of one module.

        Args:
            updates: per adapter, float64 with all scaling inside; ``None``: it has none here. At least one is not None.
            space: the same in core space.
            weights: per adapter, finite.
            rank: the rank wanted; may exceed what the shapes allow.
            generator: for whatever is drawn; seeded for this module.
        """
        ...


def merge(
    adapters: Sequence[str | Path] | peft.PeftModel,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    method: str = "ctm",
    output: str | Path | None = None,
    name: str = "merged",
    seed: int = 0,
    model: peft.PeftModel | None = None,
    **options: Any,
) -> MergeReport:
    """Merge LoRA adapters into one.

    Args:
        adapters: folders or hub ids; with ``model`` the names of its adapters. A ``PeftModel`` stands for all it has.
        weights: one per adapter, any sign; default all 1, which is the sum.
        rank: rank of the result; default: the method's (``ctm``: the largest rank there is; ``svd_merge``: exact).
        method: a merge method of the catalogue.
        output: folder to write (new, or empty): a plain PEFT LoRA. Without it adapters from folders are merged for the report
            alone. Memory: one module of all adapters in float64, and the result.
        name: the adapter to add to ``model``; frozen and inactive, as PEFT's ``add_weighted_adapter`` leaves it.
        seed: of what a method draws; a module's draws depend on it and on the module's name alone.
        model: a ``PeftModel`` that has the adapters.
        options: options of the method.

    Raises:
        ConfigError: adapters that cannot be merged with each other, naming both; wrong weights, rank, name, options.
        UnsupportedError: an adapter that is no plain LoRA of linear modules. Nothing was written, the model is as it was.
    """
    if isinstance(adapters, peft.PeftModel):
        if model is not None:
            raise ConfigError("adapters is a PeftModel and model= is given too; give the names of the adapters with model=")
        adapters, model = list(adapters.peft_config), adapters
    if isinstance(adapters, (str, Path)):
        raise ConfigError(f"adapters={str(adapters)!r} must be a list of adapters")
    sources = list(adapters)
    if not sources:
        raise ConfigError("adapters=[] is empty; at least one adapter is needed")
    factors = _weights(weights, len(sources))
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise ConfigError(f"rank={rank!r} must be an integer > 0, or None")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r} must be an integer")
    target = load(method, Kind.MERGE)
    config = build(catalogue().get(method, Kind.MERGE).load_config(), options, where=f"merge method {method!r}")
    how = _How(catalogue().get(method, Kind.MERGE), target(config), dict(vars(config)), rank, seed)
    if model is not None:
        return _in_model(model, sources, factors, how, output, name)
    if output is not None:
        artefacts.check_new_folder(Path(output), "output")
    loras: list[Lora] = [FolderLora(source, number) for number, source in enumerate(sources, 1)]
    check_together(loras)
    copies = _copies(loras)
    done = _merge(loras, factors, how)
    report = done.report(None if output is None else Path(output), None)
    if output is not None:
        made = done.config(loras)
        with artefacts.new_folder(Path(output)) as folder:
            _write_files(folder, how, report, made, done.padded(), copies)
    _warn(report)
    return report


def _weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    values = list(weights)
    if len(values) != count:
        raise ConfigError(f"weights={values} has {len(values)} values for {count} adapters; give one for each")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"weights={values}: {value!r} is not a finite number")
    return tuple(float(value) for value in values)


# -- what can be merged ------------------------------------------------------------------------------------------------


def check_together(loras: Sequence[Lora]) -> None:
    """Refuse adapters that do not belong together.

    Raises:
        ConfigError: another base model, other patches on it, task, orientation or shape; the message names both adapters.
    """
    for option in ("base_model_name_or_path", "revision", "task_type"):
        given = [(lora, lora.options[option]) for lora in loras if lora.options.get(option)]
        for lora, value in given[1:]:
            first, expected = given[0]
            if not _same(option, value, expected):
                raise ConfigError(
                    f"{first.where} has {option}={str(expected)!r} but {lora.where} has {str(value)!r}; adapters of different "
                    "models cannot be merged"
                )
    for lora in loras[1:]:
        theirs = [each.options.get(artefacts.PATCHES) or [] for each in (loras[0], lora)]
        first_has, other_has = ([(r.get("plugin"), r.get("options")) for r in records] for records in theirs)
        if first_has != other_has:
            raise ConfigError(
                f"{loras[0].where} was trained on a base with the patches {first_has} but {lora.where} on one with {other_has}; "
                "adapters of different models cannot be merged"
            )
        mine, other = (bool(one.options.get("fan_in_fan_out")) for one in (loras[0], lora))
        if mine != other:
            raise ConfigError(
                f"{loras[0].where} has fan_in_fan_out={mine} but {lora.where} has {other}; they are of different models"
            )
    seen: dict[str, Lora] = {}
    for lora in loras:
        for module, (_, out, into) in lora.shapes.items():
            first = seen.setdefault(module, lora)
            if first.shapes[module][1:] != (out, into):
                raise ConfigError(
                    f"{module!r} is {first.shapes[module][1:]} (out, in) in {first.where} but {(out, into)} in {lora.where}; "
                    "they are of different models"
                )


def _same(option: str, a: Any, b: Any) -> bool:
    if a == b:
        return True
    folders = option == "base_model_name_or_path" and Path(a).is_dir() and Path(b).is_dir()
    return bool(folders and Path(a).samefile(b))


def _copies(loras: Sequence[Lora]) -> dict[str, Tensor]:
    # PEFT stores the base's own weight of a targeted lm_head with the adapter. It goes into the result as it is, so that the
    # result loads as each of the adapters does; where two differ, there is no base that both are adapters of.
    found: dict[str, tuple[Lora, Tensor]] = {}
    for lora in loras:
        for name in sorted(lora.copies):
            tensor = lora.copy(name)
            first, expected = found.setdefault(name, (lora, tensor))
            if not (tensor.dtype == expected.dtype and torch.equal(tensor, expected)):
                raise ConfigError(
                    f"{first.where} and {lora.where} hold different base weights {name!r}; they are of different models"
                )
    return {name: tensor.clone() for name, (_, tensor) in found.items()}


# -- the merge ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _How:
    entry: Entry
    method: MergeMethod
    options: dict[str, Any]
    rank: int | None
    seed: int

    def generator(self, module: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {module}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class _Done:
    how: _How
    labels: tuple[str, ...]
    weights: tuple[float, ...]
    rank: int
    factors: dict[str, tuple[Tensor, Tensor]]  # float32, each of its own rank
    modules: tuple[ModuleReport, ...]
    notes: tuple[str, ...]

    def padded(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Factors of one rank: rows and columns of zeros make up the difference."""
        updates = {module: LowRank(A, B).padded(self.rank) for module, (A, B) in self.factors.items()}
        return {module: (update.A, update.B) for module, update in updates.items()}

    def report(self, output: Path | None, name: str | None) -> MergeReport:
        how = self.how
        return MergeReport(
            how.entry.method.name, how.options, self.labels, self.weights, self.rank, self.modules, output, name, self.notes
        )

    def config(self, loras: Sequence[Lora]) -> peft.LoraConfig:
        """A configuration whose scaling is exactly 1: alpha = r, no rsLoRA, no patterns."""

        def common(option: str) -> Any:
            return next((lora.options[option] for lora in loras if lora.options.get(option)), None)

        chosen = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
        targets = [{key: _plain(lora.options.get(key)) for key in chosen} for lora in loras]
        alike = all(t == targets[0] for t in targets) and all(set(lora.shapes) == set(self.factors) for lora in loras)
        made = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,
            use_rslora=False,
            lora_dropout=0.0,
            fan_in_fan_out=bool(loras[0].options.get("fan_in_fan_out")),
            inference_mode=True,
            **{key: common(key) for key in ("task_type", "base_model_name_or_path", "revision")},
            **(targets[0] if alike else {"target_modules": sorted(self.factors)}),
        )
        vars(made)[artefacts.PATCHES] = loras[0].options.get(artefacts.PATCHES) or []  # PEFT's dataclass has no field for it
        return made


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset, list, tuple)) else value


def _merge(loras: Sequence[Lora], weights: tuple[float, ...], how: _How) -> _Done:
    ranks = [shape[0] for lora in loras for shape in lora.shapes.values()]
    rank = how.rank if how.rank is not None else how.method.default_rank(ranks)
    factors, reports = {}, []
    for module in sorted({module for lora in loras for module in lora.shapes}):
        updates = [lora.read(module) for lora in loras]
        space = CoreSpace.of(updates)
        merged = how.method.merge(updates, space, weights, rank, how.generator(module))
        A, B = merged.update.A.to(torch.float32), merged.update.B.to(torch.float32)
        if not all(bool(torch.isfinite(t).all()) for t in (A, B)):
            raise ConfigError(f"the merged update of {module!r} does not fit in float32; nothing was written")
        factors[module] = A, B
        reports.append(_measure(module, updates, space, weights, merged, LowRank(A.double(), B.double())))
    widest = max(1, *(A.shape[0] for A, _ in factors.values()))
    labels = tuple(lora.title for lora in loras)
    heads = [m for m in factors if m.rpartition(".")[2] in ("lm_head", "embed_out", "score")]
    alone = "is merged as any other linear module: the base's own weight is left alone, and a tied embedding with it"
    notes = tuple(f"{m} {alone}" for m in heads)
    return _Done(how, labels, weights, widest if rank is None else rank, factors, tuple(reports), notes)


def _measure(
    module: str, updates: Sequence[LowRank | None], space: CoreSpace, weights: Sequence[float], merged: Merged, written: LowRank
) -> ModuleReport:
    norms = torch.linalg.matrix_norm(space.cores)
    scale = torch.tensor(weights, dtype=torch.float64)
    exact = torch.einsum("t,tpq->pq", scale, space.cores)
    size, parts = float(torch.linalg.matrix_norm(exact)), float(scale.abs() @ norms)
    against = size if size > _CANCELLED * parts else parts
    off = space.distance(exact, written)
    tail = torch.linalg.svdvals(exact)[merged.update.rank :]
    U, V = merged.basis
    energy: list[float | None] = []
    for update, norm in zip(updates, norms.tolist(), strict=True):
        kept = None if update is None or not norm else float(torch.linalg.matrix_norm((U.T @ update.B) @ (update.A @ V))) / norm
        energy.append(kept)

    def relative(value: float) -> float:
        return value / against if against else 0.0 if not value else math.inf

    least = relative(float(torch.linalg.vector_norm(tail)))
    return ModuleReport(module, merged.update.rank, relative(off), least, tuple(energy), merged.iterations, (off, against))


def _warn(report: MergeReport) -> None:
    for sentence in report.low():
        warnings.warn(f"{report.method}: {sentence}", stacklevel=3)


# -- where it goes -----------------------------------------------------------------------------------------------------


def _write_files(
    folder: Path,
    how: _How,
    report: MergeReport,
    config: peft.LoraConfig,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    copies: Mapping[str, Tensor],
) -> None:
    write_lora(folder, config, factors, copies)
    entry, stored = how.entry, artefacts.record(how.entry)
    rows: dict[str, Any] = {**report.as_dict()["options"], "rank": report.rank, "seed": how.seed}
    for number, (label, weight) in enumerate(zip(report.adapters, report.weights, strict=True), 1):
        rows[f"adapter {number}"] = f"{label}, weight {weight:g}"
    rows["relative error"] = (
        f"{report.error:.3g} over all modules, {report.worst.error:.3g} in the worst, against the weighted sum of the updates"
    )
    origin = f"Merged from {len(report.adapters)} LoRA adapters by `{entry.method.name}` of {stored['distribution']}"
    artefacts.plain_card(folder / "README.md", stored, origin, rows, config.base_model_name_or_path)


def _in_model(
    model: peft.PeftModel, names: Sequence[Any], weights: tuple[float, ...], how: _How, output: str | Path | None, name: str
) -> MergeReport:
    if output is not None:
        raise ConfigError(
            f"output={str(output)!r} with a model: the result is added to the model; save it with "
            f"model.save_pretrained(output, selected_adapters=[{name!r}])"
        )
    if not isinstance(model, peft.PeftModel):
        raise ConfigError(f"model={type(model).__name__} must be a PeftModel")
    if name in model.peft_config:
        raise ConfigError(f"name={name!r}: the model already has an adapter of that name; it has {list(model.peft_config)}")
    loras = [LiveLora(model, each) for each in names]
    check_together(loras)
    done = _merge(loras, weights, how)
    config = done.config(loras)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # PEFT draws first values for the factors
            model.add_adapter(name, config)
    except Exception:
        if name in model.peft_config:
            model.delete_adapter(name)
        raise
    modules: Mapping[str, Any] = dict(model.get_base_model().named_modules())
    with torch.no_grad():
        for module, (A, B) in done.padded().items():
            layer = modules[module]
            for factor, value in ((layer.lora_A[name].weight, A), (layer.lora_B[name].weight, B)):
                factor.copy_(value)
                factor.requires_grad_(False)
    report = done.report(None, name)
    _warn(report)
    return report
