"""Reading trained LoRA adapters module by module (folders, the Hub, a live ``PeftModel``), and writing them.

What is no plain LoRA is refused.

A folder is opened lazily: the names and shapes of its tensors are read at once, the tensors of a module when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hfplug.artefacts import PATCHES, is_local_path
from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.lowrank import LowRank
from hfplug.method import Kind
from hfplug.plugins import catalogue

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(rf"(?:{re.escape(PREFIX)})?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_BASE_COPY = re.compile(r".+\.base_layer\.(weight|bias)")
# Options that make an adapter more than s·B·A on linear modules, each with its harmless values.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "lora_bias": (False,), "use_qalora": (False,), "modules_to_save": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "layer_replication": (None, []),
    "megatron_config": (None,), "ensure_weight_tying": (False, None),
    **{name: (None, False) for name, f in peft.LoraConfig.__dataclass_fields__.items() if f.metadata.get("is_lora_variant")},
}  # fmt: skip
# Initialisations that change the weights of the base: the update is then one of other weights than those users have.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")


class Lora:
    """One trained LoRA adapter.

    Attributes:
        where: what it is, for messages.
        title: how a model card names it: no local path.
        options: its configuration, as adapter_config.json holds it.
        shapes: module name -> ``(rank, out, in)``.
        copies: names of tensors that are copies of the base's own weights (PEFT stores those of a targeted ``lm_head``).
    """

    def __init__(self, where: str, title: str, options: Mapping[str, Any]) -> None:
        self.where, self.title, self.options = where, title, options
        self.shapes: dict[str, tuple[int, int, int]] = {}
        self.copies: set[str] = set()
        check_options(where, options)

    def factors(self, module: str) -> tuple[Tensor, Tensor, float]:
        """``A`` ``(r, in)``, ``B`` ``(out, r)`` as stored, and PEFT's scaling."""
        raise NotImplementedError

    def copy(self, name: str) -> Tensor:
        """One of :attr:`copies`."""
        raise NotImplementedError

    def read(self, module: str) -> LowRank | None:
        """The update of a module in float64 on the CPU with the scaling in ``B``; ``None`` where the adapter has none.

        Raises:
            ConfigError: a value is not finite.
        """
        if module not in self.shapes:
            return None
        A, B, scaling = self.factors(module)
        for letter, tensor in (("A", A), ("B", B)):
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"{self.where}: lora_{letter} of {module!r} holds values that are not finite")
        return LowRank(A.detach().to("cpu", torch.float64), B.detach().to("cpu", torch.float64) * scaling)

    def enter(self, module: str, A: tuple[int, ...], B: tuple[int, ...]) -> None:
        """Note the shapes of a module's factors.

        Raises:
            ConfigError: they are no pair of factors of a linear module.
        """
        for letter, shape in (("A", A), ("B", B)):
            if 0 in shape:
                raise ConfigError(
                    f"{self.where}: lora_{letter} of {module!r} is empty, shape {shape}: it was saved (or is held) sharded, as "
                    "ZeRO-3 and FSDP do; gather the parameters and save it again"
                )
            if len(shape) != 2:
                raise UnsupportedError(
                    f"{self.where}: lora_{letter} of {module!r} has shape {shape}; only adapters of linear modules are taken"
                )
        if A[0] != B[1]:
            raise ConfigError(f"{self.where}: the factors of {module!r} do not fit: lora_A {A}, lora_B {B}")
        self.shapes[module] = (A[0], B[0], A[1])


def check_options(where: str, options: Mapping[str, Any]) -> None:
    """Refuse a configuration that is not one of a plain LoRA.

    Raises:
        ConfigError: it is not of a LoRA at all, or holds an option that this PEFT does not know.
        UnsupportedError: it is one of more than ``s·B·A``; the message names the option and what is allowed.
    """
    kind = getattr(options.get("peft_type"), "value", options.get("peft_type"))
    if kind != "LORA":
        entry = catalogue().entries.get(str(kind).lower())
        if entry is not None and entry.method.kind is Kind.TUNER:
            raise ConfigError(
                f"{where} is of type {kind!r}, a tuner of {entry.source}; write it as a plain LoRA first, where it can be: "
                "`hfplug export ADAPTER --to lora --output DIR`"
            )
        raise ConfigError(f"{where} is of type {kind!r}; only adapters of type 'LORA' are taken")
    for option, harmless in _HARMLESS.items():
        if options.get(option, harmless[0]) not in harmless:
            raise UnsupportedError(
                f"{where}: {option}={options[option]!r} makes it more than low-rank updates of linear modules; allowed: "
                f"{harmless[0]!r}"
            )
    init = str(options.get("init_lora_weights")).lower()
    if init.startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{where}: init_lora_weights={init!r} changed the weights of its base model, so its update is not one of the weights "
            "that others share; convert it (PEFT's path_initial_model_for_weight_conversion) and use the result"
        )
    known = peft.LoraConfig.__dataclass_fields__
    for option, value in options.items():
        if option not in known and option != PATCHES and value not in _EMPTY:
            raise ConfigError(
                f"{where}: this PEFT does not know the option {option!r}={value!r}{nearest(option, known)}, so what it means for "
                "the update cannot be told; upgrade PEFT"
            )


class FolderLora(Lora):
    """An adapter saved in a folder, or on the Hub.

    Args:
        source: folder or hub id.
        number: its place among the adapters, for the title.
        what: what to call it in messages.
    """

    def __init__(self, source: str | Path, number: int = 1, what: str = "adapter") -> None:
        where = f"{what} {str(source)!r}"
        config, self.path = _files(source, where)
        options = _json(config, where)
        super().__init__(where, str(source), options)
        if is_local_path(str(source)):
            self.title = f"local adapter {number}: r={options.get('r', 8)}, sha256={file_digest(self.path)}"
        self._names: dict[tuple[str, str], str] = {}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  a handle, not a mapping
                if match := _FACTOR.fullmatch(name):
                    self._names[match["module"], match["factor"]] = name
                    shapes.setdefault(match["module"], {})[match["factor"]] = tuple(file.get_slice(name).get_shape())
                elif _BASE_COPY.fullmatch(name):
                    self.copies.add(name)
                else:
                    raise UnsupportedError(f"{self.where}: {self._stranger(name)}")
        for module, pair in sorted(shapes.items()):
            if missing := {"A", "B"} - set(pair):
                raise ConfigError(f"{self.where}: {module!r} lacks its lora_{missing.pop()}; the file is not whole")
            self.enter(module, pair["A"], pair["B"])
            self._scaling(module)
        if not self.shapes:
            raise ConfigError(f"{self.where}: {WEIGHTS} holds no LoRA tensors")

    @staticmethod
    def _stranger(name: str) -> str:
        if "lora_embedding" in name:
            return f"{name!r} is of an embedding; only adapters of linear modules are taken"
        if "lora_magnitude" in name:
            return f"{name!r} is a magnitude of DoRA, which is no low-rank update"
        return f"the tensor {name!r} is no LoRA factor; whole weights (embeddings, heads, biases) are not taken"

    def _scaling(self, module: str) -> float:
        ranks, alphas = self.options.get("rank_pattern") or {}, self.options.get("alpha_pattern") or {}
        rank = ranks.get(get_pattern_key(ranks, module), self.options.get("r", 8))
        alpha = alphas.get(get_pattern_key(alphas, module), self.options.get("lora_alpha", 8))
        if rank != self.shapes[module][0]:
            raise ConfigError(
                f"{self.where}: adapter_config.json gives {module!r} the rank {rank}, but its factors have "
                f"{self.shapes[module][0]}"
            )
        return float(alpha / (rank**0.5 if self.options.get("use_rslora") else rank))

    def factors(self, module: str) -> tuple[Tensor, Tensor, float]:
        with safe_open(self.path, framework="pt") as file:
            A, B = (file.get_tensor(self._names[module, letter]) for letter in "AB")
        return A, B, self._scaling(module)

    def copy(self, name: str) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)


def _files(source: str | Path, where: str) -> tuple[Path, Path]:
    names = ("adapter_config.json", WEIGHTS)
    folder = Path(source)
    if folder.is_dir():
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and (folder / "adapter_model.bin").is_file():
            raise UnsupportedError(
                f"{where} holds adapter_model.bin, a pickle, which can run code and is not read; save it with safetensors "
                "(PeftModel.save_pretrained does)"
            )
        if missing:
            raise ConfigError(f"{where}: the folder lacks {' and '.join(missing)}")
        return folder / names[0], folder / names[1]
    if is_local_path(str(source)):
        raise ConfigError(f"{where}: there is no such folder")
    from huggingface_hub import hf_hub_download

    try:
        config, weights = (Path(hf_hub_download(str(source), name)) for name in names)
    except Exception as error:  # the Hub's client has many, for one outcome
        raise ConfigError(f"{where} is neither a folder nor an adapter on the Hub: {error}") from error
    return config, weights


def _json(path: Path, where: str) -> dict[str, Any]:
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{where}: {path.name} is damaged: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: {path.name} holds no mapping of options")
    return options


def file_digest(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LiveLora(Lora):
    """An adapter of a ``PeftModel`` in memory; its scaling is the one the model uses now.

    Args:
        model: the model.
        name: the adapter's name.
        where: what to call it in messages.
        apart: options that the caller takes care of, whatever they say (``modules_to_save``).

    Raises:
        ConfigError: there is no such adapter.
    """

    def __init__(self, model: peft.PeftModel, name: str, where: str = "", apart: Collection[str] = ()) -> None:
        where = where or f"adapter {name!r} of the model"
        if name not in model.peft_config:
            known = list(model.peft_config)
            raise ConfigError(f"the model has no adapter {name!r}{nearest(name, known)}; it has {known}")
        options = {key: value for key, value in model.peft_config[name].to_dict().items() if key not in apart}
        super().__init__(where, f"adapter {name!r}", options)
        self._name, self._layers = name, {}
        for path, layer in model.get_base_model().named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            if name in layer.lora_embedding_A:
                raise UnsupportedError(f"{where}: {path!r} is an embedding; only adapters of linear modules are taken")
            if name not in layer.lora_A:
                continue
            if name in layer.merged_adapters:
                raise ConfigError(f"{where} is merged into the weights of {path!r}; call model.unmerge_adapter() first")
            pair = layer.lora_A[name], layer.lora_B[name]
            if not all(isinstance(factor, nn.Linear) for factor in pair):
                raise UnsupportedError(f"{where}: {path!r} is no linear module; only adapters of linear modules are taken")
            self._layers[path] = layer
            self.enter(path, tuple(pair[0].weight.shape), tuple(pair[1].weight.shape))
        if not self.shapes:
            raise ConfigError(f"{where} adapts no module")

    def factors(self, module: str) -> tuple[Tensor, Tensor, float]:
        layer = self._layers[module]
        return layer.lora_A[self._name].weight, layer.lora_B[self._name].weight, float(layer.scaling[self._name])


def write_lora(folder: Path, config: Any, factors: Mapping[str, tuple[Tensor, Tensor]], rest: Mapping[str, Tensor]) -> None:
    """Write a plain LoRA adapter, the same file for the same adapter.

    Args:
        folder: an existing folder.
        config: the ``LoraConfig``.
        factors: module name -> ``A``, ``B``.
        rest: what else the file holds, by its name there.

    Raises:
        ConfigError: a tensor is empty (a sharded parameter) or not finite (a diverged run).
    """
    own = {f"{PREFIX}{m}.lora_{n}.weight": t for m, pair in factors.items() for n, t in zip("AB", pair, strict=True)}
    tensors = {**own, **rest}
    for name, tensor in tensors.items():
        if not tensor.numel() or not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{name} is empty or not finite (a sharded checkpoint, or a diverged run?); nothing was written")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    options = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(options["target_modules"], list):  # PEFT writes a set, in any order
        options["target_modules"].sort()
    path.write_text(json.dumps(options, indent=2, sort_keys=True) + "\n", encoding="utf-8")
