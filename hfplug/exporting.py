"""Export: an adapter of a plugin as a plain PEFT LoRA, which loads where hfplug is not installed.

Works on the adapter's folder alone. The base model is needed only to measure how far an approximation is off.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hfplug import artefacts
from hfplug.errors import ConfigError, HfplugError, UnsupportedError, nearest
from hfplug.loras import PREFIX, WEIGHTS, write_lora
from hfplug.method import Kind
from hfplug.plugins import catalogue
from hfplug.probing import evaluating, probe_ids
from hfplug.seams.patch_adapters import trained_on
from hfplug.seams.tuner import PluginConfig, PluginTuner

FORMATS = ("lora",)
_EXACT = 1e-2  # of the logits' size: more than any rounding of a half-precision base


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        output: the folder.
        method: the tuner that was exported.
        modules: number of LoRA modules.
        rank: the largest rank.
        approximation: what was lost, ``None`` where the LoRA does exactly what the adapter does at inference.
        logit_error: largest difference of the logits on the probe, measured against the adapter; ``None`` without a base.
        logit_scale: root mean square of the adapter's logits on the probe, to read the error by.
    """

    output: Path
    method: str
    modules: int
    rank: int
    approximation: str | None
    logit_error: float | None
    logit_scale: float | None

    def __str__(self) -> str:
        measured = "not measured (no base model given)"
        if self.logit_error is not None:
            measured = f"{self.logit_error:.3g} at most, on logits of root mean square {self.logit_scale:.3g}"
        exact = f"an approximation: {self.approximation}" if self.approximation else "exact"
        return (
            f"{self.method} -> LoRA of rank {self.rank} on {self.modules} modules in {self.output}\n"
            f"{exact}\ndifference of the logits: {measured}"
        )


def export(
    adapter: str | Path,
    output: str | Path,
    *,
    to: str = "lora",
    base: Any = None,
    approximate: bool = False,
    probe: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a saved adapter as a plain LoRA.

    Args:
        adapter: folder of an adapter that a tuner of hfplug saved.
        output: folder to write; it must not exist, or be empty.
        to: the format; ``"lora"``.
        base: the base model (loaded, a path, a hub id, or ``"smollm2"``), to measure the difference of the logits on.
        approximate: accept a tuner that depends on the input, whose mean is exported; needs ``base``.
        probe: keyword arguments of the forward to measure on; default 2 rows of 32 token ids spread over the vocabulary.

    Raises:
        ConfigError: a folder that holds no adapter of hfplug, an output that exists, an unknown format.
        UnsupportedError: a tuner that is not low-rank at inference, saying what it can do.
    """
    if to not in FORMATS:
        raise ConfigError(f"to={to!r}{nearest(to, FORMATS)}; an adapter can be exported to: {', '.join(FORMATS)}")
    adapter, output = Path(adapter), Path(output)
    artefacts.check_new_folder(output, "output")
    config, tensors = read_adapter(adapter)
    tuner: type[PluginTuner] = catalogue().get(config.method, Kind.TUNER).load_target()
    if tuner.lora_differs and not (approximate and base is not None):
        missing = "approximate=True" if not approximate else "base=, to measure the error on"
        raise UnsupportedError(
            f"{config.method} is not a plain LoRA at inference: {tuner.lora_differs}. To export that approximation give {missing}"
            " (hfplug export --approximate --base MODEL)"
        )
    modules, rest = split(tensors, tuner.prefix)
    factors = {key: tuner.to_lora(config, own, key) for key, own in modules.items()}
    made = lora_config({key: a.shape[0] for key, (a, _) in factors.items()}, config)
    vars(made)[artefacts.PATCHES] = trained_on(config)  # it is an adapter of a patched base still
    error = scale = None
    with artefacts.new_folder(output) as folder:
        write_lora(folder, made, {key: (a.float(), b.float()) for key, (a, b) in factors.items()}, rest)
        options = {k: v for k, v in config.to_dict().items() if k not in config.hidden_options and v is not None}
        stored = artefacts.record(catalogue().get(config.method, Kind.TUNER))
        origin = f"Exported from a `{config.method}` adapter by {stored['distribution']}"
        artefacts.plain_card(folder / "README.md", stored, origin, options, made.base_model_name_or_path)
        if base is not None:
            error, scale = _difference(base, adapter, folder, config.task_type, probe)
            if tuner.lora_differs is None and error > _EXACT * max(scale, 1.0):
                raise HfplugError(
                    f"the exported LoRA should do exactly what the {config.method} adapter does, but its logits differ by "
                    f"{error:.3g} on a base whose logits have a root mean square of {scale:.3g}; nothing was written"
                )
    rank = max(a.shape[0] for a, _ in factors.values())
    return ExportReport(output, config.method, len(factors), rank, tuner.lora_differs, error, scale)


def read_adapter(folder: Path) -> tuple[PluginConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors of an adapter of a plugin, on the CPU.

    Raises:
        ConfigError: no such adapter, one without a plugin, or one saved as a pickle, which is not read.
    """
    from peft import PeftConfig

    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"adapter={str(folder)!r} is not the folder of an adapter: it holds no adapter_config.json")
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, PluginConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        done = "it is a plain LoRA already" if kind == "LORA" else f"it is of PEFT's own type {kind}"
        raise ConfigError(f"adapter={str(folder)!r} was not made by a tuner of hfplug: {done}, nothing to export")
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"adapter={str(folder)!r} holds no {WEIGHTS}; adapters saved as pickles are not read: save it with safe_serialization"
        )
    return config, load_file(folder / WEIGHTS)


def split(tensors: Mapping[str, torch.Tensor], prefix: str) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The tuner's tensors by module and name within the layer, and what else the file holds (``modules_to_save``)."""
    own = re.compile(rf"^{re.escape(PREFIX)}(.+?)\.({re.escape(prefix)}.+)$")
    modules: dict[str, dict[str, torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if found := own.match(name):
            modules.setdefault(found[1], {})[found[2]] = tensor
        else:
            rest[name] = tensor
    if not modules:
        raise ConfigError(f"the adapter holds no tensor of {prefix.rstrip('_')!r}; its tensors: {sorted(tensors)[:3]}")
    return modules, rest


def lora_config(ranks: Mapping[str, int], source: Any) -> Any:
    """A ``LoraConfig`` with scaling exactly 1 for modules of these ranks, on the targets of another configuration."""
    import peft

    r = Counter(ranks.values()).most_common(1)[0][0]
    other = {key: rank for key, rank in ranks.items() if rank != r}
    kept = ("task_type", "base_model_name_or_path", "revision", "exclude_modules", "modules_to_save")
    return peft.LoraConfig(
        r=r,
        lora_alpha=r,
        use_rslora=False,
        rank_pattern=dict(other),
        alpha_pattern=dict(other),
        target_modules=sorted(ranks),
        inference_mode=True,
        **{name: getattr(source, name) for name in kept},
    )


_HEADS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


def _load_base(base: Any, task_type: Any) -> Any:
    if not isinstance(base, (str, Path)):
        return base
    import transformers

    from hfplug.models import resolve_model

    task = str(getattr(task_type, "value", task_type))
    if task not in _HEADS:
        raise ConfigError(
            f"base={str(base)!r}: the adapter's task_type is {task_type}, so the kind of head is not known; give the loaded model"
        )
    return getattr(transformers, _HEADS[task]).from_pretrained(resolve_model(str(base)))


def _difference(base: Any, adapter: Path, exported: Path, task_type: Any, probe: Mapping[str, Any] | None) -> tuple[float, float]:
    """Largest difference of the logits of two adapters on a probe, and the root mean square of the first's."""
    import peft

    logits = []
    for folder in (adapter, exported):
        model = _load_base(base, task_type)
        asked = {"input_ids": probe_ids(model, 2, 32)} if probe is None else probe
        trained = [(p, p.requires_grad) for p in model.parameters()]
        with evaluating(model):
            wrapped = peft.PeftModel.from_pretrained(model, str(folder)).eval()
            try:
                logits.append(wrapped(**asked).logits.float())
            finally:
                wrapped.unload()
                for parameter, requires_grad in trained:
                    parameter.requires_grad_(requires_grad)
    return float((logits[0] - logits[1]).abs().max()), float(logits[0].square().mean().sqrt())


def fields_of(report: ExportReport) -> dict[str, Any]:
    """JSON-ready form of a report."""
    return {**dataclasses.asdict(report), "output": str(report.output)}
