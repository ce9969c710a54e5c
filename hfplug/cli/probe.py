"""``hfplug probe fit`` and ``hfplug probe score``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfplug.cli.merging import setting
from hfplug.errors import ConfigError
from hfplug.method import Kind
from hfplug.models import model_label, resolve_model
from hfplug.plugins import catalogue, load_dotted


def _method(name: str) -> Any:
    """A public name of the method, by the catalogue."""
    entry = catalogue().get("sink_probe", Kind.CALLBACK)
    entry.check()
    return load_dotted(entry.method.public_names[name])


def _load(model: str) -> tuple[Any, Any, str]:
    """Model, tokenizer and the name a probe knows the model by."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve_model(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return AutoModelForCausalLM.from_pretrained(source).eval(), tokenizer, model_label(model)


def fit(
    data: Path, model: str, output: Path, settings: Sequence[str], folds: int, seeds: int, chat: bool, batch_size: int
) -> dict[str, Any]:
    """Fit a probe on labelled answers, judge it and its baselines over folds, and save it.

    Returns:
        ``probe``, ``folder``, ``answers``, and AUROCs over the folds: ``cross_validation``, by feature name; ``control``, of
        the same probe with shuffled labels. Both empty with ``folds=0``.

    Raises:
        ConfigError: a line of the data, an option, too few questions for the folds.
    """
    records = _method("read_records")(data, label=True)
    options = dict(setting(text) for text in settings)
    try:
        probe = _method("SinkProbe")(**options)
    except TypeError as error:  # an option there is none of
        raise ConfigError(f"--set: {error}; options: {', '.join(_method('SinkProbe')().options)}") from error
    if output.exists():
        raise ConfigError(f"--output {output}: it exists already")
    loaded, tokenizer, name = _load(model)
    probes = _method("baselines")(probe) if folds else {probe.options["feature"]: probe}
    tables = _method("extract")(
        loaded, tokenizer, records, list(probes.values()), batch_size=batch_size, chat=chat, name=name
    )  # fmt: skip
    labels = [record["label"] for record in records]
    groups = _method("groups_of")(records)
    found: dict[str, dict[str, float]] = {}
    control: dict[str, float] = {}
    if folds:
        validate = _method("cross_validate")
        for (feature, one), table in zip(probes.items(), tables, strict=True):
            found[feature] = _figures(validate(one, table, labels, groups, folds=folds, seeds=range(seeds)))
        shuffled = validate(probe, tables[0], labels, groups, folds=folds, seeds=range(seeds), shuffle_labels=True)
        control = _figures(shuffled)
    probe.fit(tables[0], labels, groups)
    probe.save(output)
    return {
        "folder": str(output), "probe": repr(probe), "answers": len(records), "cross_validation": found, "control": control,
    }  # fmt: skip


def _figures(found: Any) -> dict[str, float]:
    return {"mean": found.mean, "std": found.std}


def score(data: Path, model: str, probe: Path, output: Path, chat: bool, batch_size: int) -> dict[str, Any]:
    """Write every record with ``probability``, how likely it has label 1; says the AUROC where all have labels of both kinds.

    Returns:
        ``answers``, ``output``, ``mean``, and ``auroc`` or ``None``.

    Raises:
        ConfigError: a line of the data, a folder without a probe, or an output that exists.
        UnsupportedError: the probe was fitted on another model, or another format of the prompt.
    """
    records = _method("read_records")(data)
    if output.exists():
        raise ConfigError(f"--output {output}: it exists already")
    fitted = _method("SinkProbe").load(probe)
    loaded, tokenizer, name = _load(model)
    (table,) = _method("extract")(loaded, tokenizer, records, [fitted], batch_size=batch_size, chat=chat, name=name)
    chances = fitted.predict_proba(table)[:, 1]
    lines = [json.dumps({**r, "probability": float(p)}, ensure_ascii=False) for r, p in zip(records, chances, strict=True)]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    labels = [record.get("label") for record in records]
    auroc = _method("auroc")(labels, chances) if set(labels) == {0, 1} else None
    return {"answers": len(records), "output": str(output), "mean": float(chances.mean()), "auroc": auroc}


def show_fit(done: dict[str, Any]) -> None:
    """Print what :func:`fit` returned."""
    if done["cross_validation"]:
        print(f"AUROC on held-out questions, mean and standard deviation of the folds ({done['answers']} answers):")
        for name, found in done["cross_validation"].items():
            print(f"  {name:<14} {found['mean']:.3f} ± {found['std']:.3f}")
        print(f"  {'labels shuffled':<14} {done['control']['mean']:.3f} ± {done['control']['std']:.3f}")
    print(f"{done['probe']}, saved to {done['folder']}")


def show_score(done: dict[str, Any]) -> None:
    """Print what :func:`score` returned."""
    told = "" if done["auroc"] is None else f", AUROC {done['auroc']:.3f}"
    print(f"{done['answers']} answers, mean probability {done['mean']:.3f}{told}; written to {done['output']}")
