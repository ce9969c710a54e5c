"""Reading trained LoRA adapters: what can be an expert, its factors and scalings, and the record kept of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn

from hfplug.artefacts import is_local_path
from hfplug.errors import ConfigError, UnsupportedError, nearest

Modules = dict[str, tuple[int, float]]  # full module name -> (rank, scaling)
Factors = dict[str, tuple[Tensor, Tensor]]  # full module name -> A (r, in), B (out, r)
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# Options of LoraConfig that make an adapter something else than s·B·A on linear modules, each with its harmless values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_qalora": (False,), "lora_bias": (False,), "bias": ("none",), "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}), "target_parameters": (None, []), "layer_replication": (None, []),
    "megatron_config": (None,), **{f: (None, False) for f, d in LoraConfig.__dataclass_fields__.items()
                                   if d.metadata.get("is_lora_variant")},
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # such an adapter belongs to a base with other weights


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
        ConfigError: there is none, it is damaged, or it is no plain LoRA of linear modules.
    """
    where = f"expert {name!r} ({source})"
    files = _files(where, source)
    options = json.loads(files["adapter_config.json"].read_text(encoding="utf-8"))
    if options.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type is {options.get('peft_type')!r}; an expert must be a plain 'LORA' adapter")
    for option, harmless in _REFUSED.items():
        if options.get(option, harmless[0]) not in harmless:
            raise ConfigError(
                f"{where}: {option}={options[option]!r} makes it more than s·B·A on linear modules, so it cannot be routed per "
                f"token; allowed: {harmless[0]!r}"
            )
    init = str(options.get("init_lora_weights")).lower()
    if init.startswith(_CHANGES_BASE):
        raise ConfigError(f"{where}: init_lora_weights={init!r} changed the weights of its base model, which the experts share")
    found: dict[str, dict[str, Tensor]] = {}
    tensors = load_file(files["adapter_model.safetensors"])
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2 or not tensor.is_floating_point():
            raise ConfigError(f"{where}: the tensor {key!r} {tuple(tensor.shape)} is no LoRA factor of a linear module")
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    modules, factors = {}, {}
    for module, pair in sorted(found.items()):
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {factor: tuple(tensor.shape) for factor, tensor in pair.items()}
            raise ConfigError(f"{where}: module {module!r} has the factors {shapes}; A and B do not fit")
        rank = pair["A"].shape[0]
        ranks, alphas = options.get("rank_pattern") or {}, options.get("alpha_pattern") or {}
        named = ranks.get(get_pattern_key(ranks, module), options.get("r", 8))
        if named != rank:
            raise ConfigError(f"{where}: module {module!r} has rank {rank}, but adapter_config.json says {named}")
        alpha = alphas.get(get_pattern_key(alphas, module), options.get("lora_alpha", 8))
        modules[module] = (rank, float(alpha / (rank**0.5 if options.get("use_rslora") else rank)))
        factors[module] = (pair["A"], pair["B"])
    if not modules:
        raise ConfigError(f"{where}: its file holds no tensors")
    return Expert(modules, factors, digest(factors), options.get("base_model_name_or_path") or None)


def _files(where: str, source: str | Path) -> dict[str, Path]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    if Path(source).is_dir():
        found = {name: Path(source) / name for name in names}
        missing = [name for name, path in found.items() if not path.is_file()]
        if missing:
            pickled = (Path(source) / "adapter_model.bin").is_file() and missing == [names[1]]
            why = "; adapter_model.bin is a pickle and is not read: save it with safetensors" if pickled else ""
            raise ConfigError(f"{where}: the folder lacks {missing}{why}")
        return found
    if is_local_path(str(source)):
        raise ConfigError(f"{where}: there is no such folder")
    from huggingface_hub import hf_hub_download

    try:
        return {name: Path(hf_hub_download(str(source), name)) for name in names}
    except Exception as error:
        raise ConfigError(f"{where}: neither a folder nor an adapter on the Hub: {error}") from error


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
