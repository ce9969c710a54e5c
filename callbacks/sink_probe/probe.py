"""The probe: logistic regression on standardised features; scikit-learn fits it, numpy applies it, two plain files keep it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfplug import ConfigError, HfplugError, UnsupportedError, __version__
from hfplug.callbacks.sink_probe.evaluate import auroc, grouped_folds
from hfplug.callbacks.sink_probe.features import FEATURES, SINGLE, SPANS, VALUE_NORMS, FeatureTable, Layout
from hfplug.errors import nearest

GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FORMAT = 1


class SinkProbe:
    """Finds answers with a property (being wrong) by what the model's attention sinks look like.

    Features: in every layer and head the ``k`` largest sink scores (mean attention a token of prompt or answer receives),
    sorted, positions dropped. Classifier: logistic regression, L1 by default, on standardised features. The definition of the
    score and the classifier are the paper's; ``k``, the grid and the self-edge convention are our reading. A baseline is the
    same class with another ``feature``.

    Args:
        k: scores kept per layer and head.
        C: inverse strength of the penalty, or several: the best by cross-validation inside the training data is taken.
        penalty: ``"l1"`` or ``"l2"``.
        solver: ``"liblinear"`` or ``"saga"`` of scikit-learn.
        class_weight: ``"balanced"``, or ``None``: as frequent as they are.
        min_queries: tokens seen by fewer queries are left out; 1: as the paper. The last tokens have few.
        include_self: whether a token's attention to itself counts.
        span: queries that count: ``"all"``, or those of the ``"answer"``.
        layers: indices, negative ones from the end; ``None``: all.
        value_norm: ``"mul"``: scores times the norm of the token's value, an ablation.
        feature: one of :data:`~hfplug.callbacks.sink_probe.features.FEATURES`.
        pca: reduce to this many components before the regression, as LapEigvals does with 512; ``None``: no.
        seed: of the folds that choose ``C``, and of the solver.

    Attributes:
        coef: ``(width,)`` float64 weights of the standardised features, and ``intercept``; ``None`` until fitted.
        mean, scale: ``(width,)`` float64, by which features are standardised.
        layout: what the columns are; ``None`` where a plain array was fitted.
        chosen: the ``C`` taken.

    Raises:
        ConfigError: a bad option.
    """

    def __init__(
        self,
        k: int = 10,
        C: float | Sequence[float] = GRID,
        penalty: str = "l1",
        solver: str = "liblinear",
        class_weight: str | None = "balanced",
        min_queries: int = 1,
        include_self: bool = True,
        span: str = "all",
        layers: Sequence[int] | None = None,
        value_norm: str = "none",
        feature: str = "sink",
        pca: int | None = None,
        seed: int = 0,
    ) -> None:
        grid = (C,) if isinstance(C, (int, float)) else tuple(C)
        choices = {
            "penalty": (penalty, ("l1", "l2")), "solver": (solver, ("liblinear", "saga")), "span": (span, SPANS),
            "class_weight": (class_weight, ("balanced", None)), "value_norm": (value_norm, VALUE_NORMS),
            "feature": (feature, tuple(FEATURES)),
        }  # fmt: skip
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                near = nearest(str(value), [str(a) for a in allowed])
                raise ConfigError(f"{name}={value!r} must be one of {list(allowed)}{near}")
        for name, number in (("k", k), ("min_queries", min_queries), ("pca", pca)):
            if number is not None and (type(number) is not int or number < 1):
                raise ConfigError(f"{name}={number!r} must be a whole number, 1 or more")
        if not grid or any(isinstance(c, bool) or not isinstance(c, (int, float)) or not c > 0 for c in grid):
            raise ConfigError(f"C={C!r} must be a positive number, or some")
        if layers is not None and (not layers or len(set(layers)) < len(layers)):
            raise ConfigError(f"layers={layers!r} must name at least one layer, each once; None takes all")
        self.options: dict[str, Any] = {
            "k": k, "C": [float(c) for c in grid], "penalty": penalty, "solver": solver, "class_weight": class_weight,
            "min_queries": min_queries, "include_self": include_self, "span": span,
            "layers": None if layers is None else [int(i) for i in layers], "value_norm": value_norm, "feature": feature,
            "pca": pca, "seed": seed,
        }  # fmt: skip
        self.coef: np.ndarray | None = None
        self.mean = self.scale = np.zeros(0)
        self.intercept, self.chosen = 0.0, 0.0
        self.layout: Layout | None = None
        self.facts: dict[str, Any] = {}

    def __repr__(self) -> str:
        state = "not fitted" if self.coef is None else f"fitted, {len(self.support)} of {len(self.coef)} weights"
        return f"SinkProbe(feature={self.options['feature']!r}, k={self.options['k']}, {state})"

    def unfitted(self, **changes: Any) -> SinkProbe:
        """A probe with the same options, or some changed, that knows nothing."""
        return SinkProbe(**{**self.options, **changes})

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, features: FeatureTable | np.ndarray, labels: Sequence[int] | np.ndarray, groups: Any = None) -> SinkProbe:
        """Fit, replacing what was fitted before.

        Args:
            features: as :func:`~hfplug.callbacks.sink_probe.extract.extract` makes them, or an array ``(answers, width)``.
            labels: 1 for what is to be found, 0 else.
            groups: one value per answer, equal for answers to the same question, which then never stand on both sides of a
                fold; ``None``: each for itself.

        Raises:
            ConfigError: lengths that do not fit, labels of one class alone, too few questions to choose ``C``.
            HfplugError: scikit-learn is not installed.
        """
        _need_sklearn()
        x, layout = _matrix(features)
        y = _labels(labels, len(x))
        c = self._choose(x, y, groups)
        self.mean, self.scale = _standard(x)
        self.coef, self.intercept = self._regress((x - self.mean) / self.scale, y, c)
        self.layout, self.chosen = layout, c
        self.facts = {"answers": len(y), "of label 1": int(y.sum()), "scikit-learn": importlib.metadata.version("scikit-learn")}
        return self

    def fit_records(self, model: Any, tokenizer: Any, records: Sequence[Mapping[str, Any]], **how: Any) -> SinkProbe:
        """Extract the features of records with labels, and fit; ``how`` as for ``extract``."""
        from hfplug.callbacks.sink_probe.extract import extract
        from hfplug.callbacks.sink_probe.records import check_records, groups_of

        known = check_records(records, label=True)
        (table,) = extract(model, tokenizer, known, [self], **how)
        return self.fit(table, [r["label"] for r in known], groups_of(known))

    def _choose(self, x: np.ndarray, y: np.ndarray, groups: Any) -> float:
        grid: list[float] = self.options["C"]
        if len(grid) == 1:
            return grid[0]
        means = []
        folds = grouped_folds(y, groups, 5, self.options["seed"], fewer=True)
        for c in grid:
            found = []
            for train, test in folds:
                mean, scale = _standard(x[train])
                coef, _ = self._regress((x[train] - mean) / scale, y[train], c)
                found.append(auroc(y[test], ((x[test] - mean) / scale) @ coef))
            means.append(float(np.mean(found)))
        return grid[int(np.argmax(means))]  # of equals the strongest penalty

    def _regress(self, x: np.ndarray, y: np.ndarray, c: float) -> tuple[np.ndarray, float]:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        turn = None
        if self.options["pca"] is not None:
            turn = np.linalg.svd(x, full_matrices=False)[2][: self.options["pca"]].T
            x = x @ turn
        # scikit-learn 1.8 replaced penalty= by l1_ratio=.
        new = inspect.signature(LogisticRegression).parameters["penalty"].default == "deprecated"
        l1 = self.options["penalty"] == "l1"
        penalty: dict[str, Any] = {"l1_ratio": float(l1)} if new else {"penalty": self.options["penalty"]}
        model = LogisticRegression(
            C=c, solver=self.options["solver"], class_weight=self.options["class_weight"], max_iter=2000,
            random_state=self.options["seed"], tol=1e-4, **penalty,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # weak penalties on few rows; the folds judge them
            model.fit(x, y)
        coef = model.coef_[0].astype(np.float64)
        return (coef if turn is None else turn @ coef), float(model.intercept_[0])

    # -- applying -----------------------------------------------------------------------------------------------------

    def predict_proba(self, features: FeatureTable | np.ndarray) -> np.ndarray:
        """``(answers, 2)`` float64: probability of label 0 and of label 1. Needs numpy alone.

        Raises:
            HfplugError: nothing is fitted.
            UnsupportedError: the features are of another model, or of other layers, heads, k or options.
        """
        if self.coef is None:
            raise HfplugError("this SinkProbe is not fitted: fit it on answers of your model with labels, or load() one that is")
        if isinstance(features, FeatureTable) and self.layout is not None:
            self.layout.check(features.layout)
        x, _ = _matrix(features)
        if x.shape[1] != len(self.coef):
            raise UnsupportedError(f"features of width {x.shape[1]}, but the probe was fitted on {len(self.coef)}")
        z = np.clip((x - self.mean) / self.scale @ self.coef + self.intercept, -700, 700)
        p = 1 / (1 + np.exp(-z))
        return np.stack([1 - p, p], axis=1)

    def score(self, features: FeatureTable | np.ndarray, labels: Sequence[int] | np.ndarray) -> float:
        """AUROC of the probability of label 1."""
        return auroc(labels, self.predict_proba(features)[:, 1])

    @property
    def support(self) -> list[tuple[int, ...]]:
        """Columns with a weight: ``(layer, head, rank)``, without a layout ``(column,)``."""
        if self.coef is None:
            return []
        used = np.flatnonzero(self.coef)
        if self.layout is None or self.layout.feature in SINGLE:
            return [(int(i),) for i in used]
        where = zip(*np.unravel_index(used, self.layout.shape_by_head), strict=True)
        return [(self.layout.layers[layer], int(head), int(rank)) for layer, head, rank in where]

    # -- keeping ------------------------------------------------------------------------------------------------------

    def to_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What :meth:`save` writes: plain JSON and named arrays.

        Raises:
            HfplugError: nothing is fitted.
        """
        if self.coef is None:
            raise HfplugError("this SinkProbe is not fitted: there is nothing to save")
        layout = None if self.layout is None else {**dataclasses.asdict(self.layout), "layers": list(self.layout.layers)}
        about = {
            "format": FORMAT, "hfplug": __version__, "options": self.options, "layout": layout, "intercept": self.intercept,
            "chosen": self.chosen, "facts": self.facts,
        }  # fmt: skip
        return about, {"coef": self.coef, "mean": self.mean, "scale": self.scale}

    @classmethod
    def from_state(cls, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str = "probe") -> SinkProbe:
        """The probe of :meth:`to_state`.

        Raises:
            HfplugError: damaged, or written by a newer hfplug.
        """
        try:
            if about["format"] != FORMAT:
                raise HfplugError(f"{where}: format {about['format']!r} is not known to hfplug {__version__}; it was written by "
                                  f"hfplug {about.get('hfplug')!r}: update hfplug")  # fmt: skip
            probe = cls(**about["options"])
            layout = about["layout"]
            probe.layout = None if layout is None else Layout(**{**layout, "layers": tuple(layout["layers"])})
            probe.intercept, probe.chosen, probe.facts = float(about["intercept"]), float(about["chosen"]), dict(about["facts"])
            probe.coef, probe.mean, probe.scale = (np.asarray(arrays[n], dtype=np.float64) for n in ("coef", "mean", "scale"))
        except (KeyError, TypeError, ValueError) as error:
            raise HfplugError(f"{where}: damaged: {type(error).__name__}: {error}") from error
        sizes = {probe.coef.shape, probe.mean.shape, probe.scale.shape}
        if len(sizes) > 1 or probe.coef.ndim != 1 or (probe.layout is not None and probe.layout.width != len(probe.coef)):
            raise HfplugError(f"{where}: damaged: arrays of shapes {sorted(sizes)}")
        if not all(np.isfinite(a).all() for a in (probe.coef, probe.mean, probe.scale)):
            raise HfplugError(f"{where}: damaged: numbers that are not finite")
        return probe

    def save(self, folder: str | Path) -> Path:
        """Write ``probe.npz`` (plain arrays) and ``probe.json`` into a folder, made if need be; returns it."""
        about, arrays = self.to_state()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "probe.npz", allow_pickle=False, **arrays)
        (folder / "probe.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> SinkProbe:
        """Read what :meth:`save` wrote; runs nothing that stands in the files.

        Raises:
            ConfigError: there is no probe.
            HfplugError: it is damaged, or of a newer hfplug.
        """
        folder = Path(folder)
        if missing := [name for name in ("probe.npz", "probe.json") if not (folder / name).is_file()]:
            raise ConfigError(f"probe={str(folder)!r}: no {missing[0]} in it; SinkProbe.save() and `hfplug probe fit` write one")
        try:
            about = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
            with np.load(folder / "probe.npz", allow_pickle=False) as file:
                arrays = dict(file)
        except (OSError, ValueError) as error:
            raise HfplugError(f"{folder}: damaged: {error}") from error
        return cls.from_state(about, arrays, str(folder))


def _matrix(features: FeatureTable | np.ndarray) -> tuple[np.ndarray, Layout | None]:
    if isinstance(features, FeatureTable):
        return features.values, features.layout
    x = np.asarray(features, dtype=np.float64)
    if x.ndim < 2 or not np.isfinite(x).all():
        raise ConfigError(f"features of shape {x.shape} must be (answers, ...) finite numbers")
    return x.reshape(len(x), -1), None


def _standard(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column; 1 for one that does not vary but in the last bits."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    return mean, np.where(scale > 1e-12 * (np.abs(mean) + 1e-30), scale, 1.0)


def _labels(labels: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    y = np.asarray(labels)
    if y.shape != (count,) or not np.isin(y, (0, 1)).all():
        raise ConfigError(f"labels must be {count} times 0 or 1, one per answer; got shape {y.shape}")
    if len(np.unique(y)) < 2:
        raise ConfigError(f"labels are all {int(y[0])}: there is nothing to tell apart")
    return y.astype(np.int64)


def _need_sklearn() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise HfplugError("fitting a probe needs scikit-learn: pip install 'hfplug[probes]'")
