"""Reading trained LoRA adapters: what can be an expert, its factors and scalings, and the record kept of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features
from torch import Tensor, nn

from hfplug.artefacts import is_local_path
from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.loras import FolderLora

Modules = dict[str, tuple[int, float]]  # full module name -> (rank, scaling)
Factors = dict[str, tuple[Tensor, Tensor]]  # full module name -> A (r, in), B (out, r)


@dataclass(frozen=True)
class Expert:
    """One adapter as read from its folder.

    Attributes:
        modules: rank and scaling (PEFT's: ``alpha/r``, or ``alpha/sqrt(r)`` with rsLoRA) of every module it adapts.
        factors: the tensors; empty when the expert is known from its record only.
        sha256: over names, shapes, dtypes and bytes of all tensors, as the folder held them.
        base: the base model its configuration names.
    """

    modules: Modules
    factors: Factors
    sha256: str
    base: str | None

    def record(self) -> dict[str, Any]:
        """What adapter_config.json keeps: the hash, and the modules with rank and scaling; no path."""
        return {"sha256": self.sha256, "modules": pack(self.modules)}


def read_expert(name: str, source: str | Path) -> Expert:
    """Read a LoRA adapter from a folder or the Hub.

    Raises:
        ConfigError: there is none, it is damaged, or it is no LoRA.
        UnsupportedError: it is more than a plain LoRA of linear modules.
    """
    lora = FolderLora(source, what=f"expert {name!r}")
    if lora.copies:
        name = min(lora.copies)
        raise UnsupportedError(f"{lora.where}: {name!r} is a copy of a weight of the base, saved with a target that is not taken")
    modules, factors = {}, {}
    for module in sorted(lora.shapes):
        a, b, scaling = lora.factors(module)
        modules[module], factors[module] = (a.shape[0], scaling), (a, b)
    return Expert(modules, factors, digest(factors), lora.options.get("base_model_name_or_path") or None)


def digest(factors: Factors) -> str:
    """sha256 over module names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for module, pair in sorted(factors.items()):
        for letter, tensor in zip("AB", pair, strict=True):
            total.update(f"{module}.{letter} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def pack(modules: Modules) -> dict[str, list[list[Any]]]:
    """Module names with their first number replaced by ``*``: ``{"layers.*.q_proj": [[rank, scaling, [0, 1]]]}``."""
    packed: dict[str, dict[tuple[int, float], list[int]]] = {}
    for module, setting in modules.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", module)
        pattern = module if number is None else f"{module[: number.start()]}*{module[number.end() :]}"
        packed.setdefault(pattern, {}).setdefault(setting, []).extend([] if number is None else [int(number.group())])
    return {p: [[r, s, sorted(n)] for (r, s), n in settings.items()] for p, settings in packed.items()}


def unpack(name: str, record: Mapping[str, Any]) -> Expert:
    """The expert of a record, without tensors.

    Raises:
        ConfigError: the record is damaged.
    """
    try:
        modules = {
            module: (int(rank), float(scaling))
            for pattern, settings in record["modules"].items()
            for rank, scaling, numbers in settings
            for module in ([pattern.replace("*", str(n), 1) for n in numbers] or [pattern])
        }
        return Expert(modules, {}, str(record["sha256"]), None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"expert {name!r}: its record {dict(record)!r} is damaged ({error!r})") from error


def check_bases(experts: Mapping[str, Expert], model: Any) -> None:
    """Refuse experts that name different base models, or another one than the model's hub id."""
    named = {name: expert.base for name, expert in experts.items() if expert.base}
    if len(set(named.values())) > 1:
        raise ConfigError(
            f"the experts were trained on different base models: {named}; pass allow_other_base=True if these are the same"
        )
    own = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    for name, base in named.items():
        if own and base != own and not is_local_path(own) and not is_local_path(base or ""):
            raise ConfigError(
                f"expert {name!r} was trained on {base!r}, the model is {own!r}; pass allow_other_base=True if these are the "
                "same weights"
            )


def check_fit(name: str, expert: Expert, model: nn.Module) -> None:
    """Refuse an expert with a module that the model does not have, or with other shapes, before anything is changed."""
    known = dict(model.named_modules())
    for module, (rank, _) in expert.modules.items():
        target = known.get(module)
        if target is None:
            raise ConfigError(
                f"expert {name!r} adapts {module!r}, which {type(model).__name__} does not have"
                f"{nearest(module, _linear(known))}; was it trained on another model?"
            )
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        sides = _get_in_out_features(base)
        if sides[0] is None:
            raise UnsupportedError(f"expert {name!r} adapts {module!r}, a {type(base).__name__}; only linear modules are routed")
        if module in expert.factors:
            a, b = expert.factors[module]
            if (a.shape[1], b.shape[0]) != tuple(sides):
                raise ConfigError(
                    f"expert {name!r}: {module!r} is a map {a.shape[1]} -> {b.shape[0]} of rank {rank}, in the model it is "
                    f"{sides[0]} -> {sides[1]}; was it trained on another model?"
                )


def _linear(modules: Mapping[str, nn.Module]) -> Iterable[str]:
    return (name for name, module in modules.items() if name and _get_in_out_features(module)[0] is not None)
