"""Quantizers: ``from_pretrained(..., quantization_config=...)`` with a method of a plugin.

A method author writes three classes::

    @dataclass(repr=False)
    class Int8Config(QuantizerConfig):
        method: ClassVar[str] = "int8"                      # = Method.name and the ``quant_method`` of config.json
        group: int = field(default=64, metadata={"help": "weights per scale"})

    class Int8Linear(PackedLinear): ...                     # hfplug.packed: layout, pack, unpack; product where it has a kernel

    class Int8Quantizer(PluginQuantizer):                   # = Method.target
        method, linear_cls = "int8", Int8Linear

``nn.Linear`` modules are replaced while the model has no data yet; each weight is packed as it is read from the file, so the
model in full precision is never in memory.

Configuration and quantizer are entered under the method's name into the two mappings of transformers, through the ledger rather
than by ``register_quantizer``, which cannot be taken back. Further:

* a folder whose plugin is missing is refused with the install line: transformers warns, skips, and goes on;
* asking for another format than the stored one is refused: transformers warns and takes the stored one.

The gate against processes without hfplug is in :mod:`hfplug.seams.gate`, adapters on top in
:mod:`hfplug.seams.quantizer_adapters`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hfplug import activation, artefacts
from hfplug.errors import ConfigError, HfplugError, UnsupportedError, nearest, one_line
from hfplug.ledger import Ledger
from hfplug.method import Kind
from hfplug.options import Checked, build
from hfplug.packed import PackedLinear, packed_modules
from hfplug.plugins import Entry, catalogue

logger = logging.getLogger(__name__)

_ROUTERS = ("gate", "router", "shared_expert_gate")  # modules that choose experts: a changed bit sends a token elsewhere


@dataclass(repr=False)
class QuantizerConfig(Checked, QuantizationConfigMixin):
    """Base of every quantizer configuration of a plugin: subclass it as a dataclass and set ``method``."""

    method: ClassVar[str]
    hidden_options: ClassVar[tuple[str, ...]] = ("hfplug",)
    loading_options: ClassVar[tuple[str, ...]] = ("dequantize",)
    """What does not concern how weights are stored, so that it can be chosen anew for a packed folder."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # What a user asked for by name must not be told from a default by its value.
        made = super().__new__(cls)
        vars(made)["_asked"] = {*kwargs, *(f.name for f, _ in zip([f for f in fields(cls) if f.init], args, strict=False))}
        return made

    quant_method: str = field(default="", init=False)
    modules_to_not_convert: list[str] | None = field(
        default=None,
        metadata={
            "help": "further modules to leave alone: suffixes, prefixes or regular expressions of names. Output heads, tied "
            "weights, routers of experts and the last module are left alone always"
        },
    )
    dequantize: bool = field(
        default=False, metadata={"help": "end with ordinary layers that hold the rounded weights, to merge or to train them"}
    )
    hfplug: dict[str, Any] | None = field(
        default=None, metadata={"help": "which plugin, distribution and version wrote this; filled in, do not set"}
    )

    def __post_init__(self) -> None:
        activation.finish()  # the module of this class may have been imported by its full name, before transformers
        self.quant_method = self.method
        entry = catalogue().get(self.method, Kind.QUANTIZER)
        if self.hfplug is not None:
            artefacts.check_record(self.hfplug, f"the {self.method} configuration")
        self.hfplug = artefacts.record(entry)

    @property
    def asked(self) -> frozenset[str]:
        """The options that were given, whatever their values."""
        return frozenset(vars(self)["_asked"])

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As transformers', but an unknown option or a value of the wrong type is an error naming the nearest valid one."""
        values = {k: v for k, v in config_dict.items() if k != "quant_method"}
        unused = {k: kwargs.pop(k) for k in list(kwargs) if not hasattr(cls, k)}
        config = build(cls, {**values, **kwargs}, where=f"quantization_config ({cls.method})")
        return (config, unused) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """What is written to config.json: everything but ``dequantize``, which is about one loading."""
        return {k: copy.deepcopy(v) for k, v in vars(self).items() if k not in ("dequantize", "_asked")}

    def with_loading_options(self, asked: QuantizerConfig) -> QuantizerConfig:
        """This configuration of a packed checkpoint, with what may be asked anew for one loading.

        Raises:
            ConfigError: another format is asked for than the one the weights are stored in.
        """
        for name in sorted(asked.asked - {"hfplug", "quant_method"}):
            own, wanted = getattr(self, name), getattr(asked, name)
            if name in self.loading_options:
                setattr(self, name, wanted)
            elif own != wanted and not (name == "modules_to_not_convert" and set(wanted or ()) <= set(own or ())):
                raise ConfigError(
                    f"the weights are stored with {name}={own!r} and cannot be read with {name}={wanted!r}; leave it out, or "
                    f"quantise the model in full precision anew. A packed folder lets choose: {', '.join(self.loading_options)}"
                )
        return self


class PluginQuantizer(HfQuantizer):
    """Base of every quantizer of a plugin; subclasses set ``method`` and ``linear_cls``."""

    method: ClassVar[str]
    linear_cls: ClassVar[type[PackedLinear]]
    quantization_config: Any

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        # What is left alone is written into it; the object of the user may serve for another model.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check what the method requires."""
        catalogue().get(self.method, Kind.QUANTIZER).check()

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the packed weights cannot."""
        return True

    # -- loading ------------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config = self.quantization_config
        linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
        asked = list(config.modules_to_not_convert or [])
        if not self.pre_quantized:
            names = [name for name, _ in model.named_modules() if name]
            for pattern in asked:
                if all(_converts(model, name, [pattern]) for name in names):
                    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
                    raise ConfigError(
                        f"modules_to_not_convert: {pattern!r} matches no module of {type(model).__name__}"
                        f"{nearest(pattern, [*parts, *names])}; names: {sorted(parts)}"
                    )
        always = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        always = [name.removesuffix(".bias") for name in always]  # of the last module transformers names the last tensor
        if self.pre_quantized:
            stored = _packed_in(checkpoint_files)
            always = [name for name in always if not any(p == name or p.endswith(f".{name}") for p in stored)]
        skip = sorted({*asked, *always})
        converted = {
            name: m for name, m in linear.items() if _converts(model, name, skip) and name.rpartition(".")[2] not in _ROUTERS
        }
        if not converted:
            raise UnsupportedError(
                f"{self.method}: {type(model).__name__} has no nn.Linear to pack besides {skip}; layers of other classes "
                "(GPT-2's Conv1D, fused experts) are not supported"
            )
        with torch.device("meta"):
            for name, module in converted.items():
                made = self.linear_cls(module.in_features, module.out_features, module.bias is not None, config)
                model.set_submodule(name, made)
        # What was left alone because of this class of model (its head) is left alone in every class that loads the folder.
        config.modules_to_not_convert = skip

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of a checkpoint in full precision is the weight of a packed module."""
        path, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(path), PackedLinear)

    def pack(self, name: str, module: PackedLinear, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of one layer from its weight in full precision; override it where that needs more than the weight."""
        return module.pack(weight, module.config)

    def get_quantize_ops(self) -> Any:
        return _Pack(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        packed = packed_modules(model)
        for name, module in packed.items():
            lacking = [n for n, p in module.named_parameters() if p.is_meta or not getattr(p, "_is_hf_initialized", False)]
            if lacking:
                raise HfplugError(
                    f"{self.method}: the checkpoint has no {lacking[0]!r} of {name!r}, which cannot be initialised; if the layer "
                    f"is new, name it in modules_to_not_convert (now {self.quantization_config.modules_to_not_convert})"
                )
        logger.info("%s", self.summary(model))
        if self.quantization_config.dequantize:
            self._dequantize(model, next(p.dtype for p in model.parameters() if p.is_floating_point()))
            if getattr(model, "hf_quantizer", None) is not None:
                self.remove_quantization_config(model)
        return model

    def summary(self, model: nn.Module) -> str:
        """One line: how many modules are packed, at what cost, and whether they run natively, emulated or dequantised."""
        packed = packed_modules(model).values()
        weights = sum(m.in_features * m.out_features for m in packed)
        bits = sum(m.bits_per_weight * m.in_features * m.out_features for m in packed) / weights
        how = self.linear_cls.execution(self.quantization_config)
        if self.quantization_config.dequantize:
            how = "dequantised: ordinary layers with the rounded weights, inputs as they are, no memory saved"
        left = ", ".join(self.quantization_config.modules_to_not_convert or [])
        return f"{self.method}: {len(packed)} linear modules of {bits:.4g} bits per weight, {how}; left alone: {left}"

    # -- back ---------------------------------------------------------------------------------------------------------

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        """As transformers', refused while an adapter stands on packed layers."""
        dtype = model.config.dtype if dtype is None else dtype
        return super().dequantize(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        packed = packed_modules(model)
        if wrapped := [name for name in packed if name.rpartition(".")[2] == "base_layer"]:
            raise UnsupportedError(f"{self.method}: {wrapped[0]!r} carries an adapter; unload it before dequantising the model")
        for name, module in packed.items():
            model.set_submodule(name, plain_linear(module, dtype))
        return model


def plain_linear(module: PackedLinear, dtype: torch.dtype) -> nn.Linear:
    """An ordinary layer with the weight that a packed one stands for."""
    with torch.device("meta"):
        made = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    made.weight = nn.Parameter(module.unpack(dtype))
    if module.bias is not None:
        made.bias = nn.Parameter(module.bias.detach().to(dtype))
    return made.train(module.training)


def _converts(model: Any, name: str, patterns: list[str]) -> bool:
    # A folder saved by a model with a head is loaded by one without it, whose names lack the prefix, and the other way round.
    names = (name, f"{model.base_model_prefix}.{name}", name.removeprefix(f"{model.base_model_prefix}."))
    return all(should_convert_module(n, patterns) for n in names)


def _packed_in(files: Iterable[str] | None) -> set[str]:
    """Names of the modules whose weight in these files is in integers."""
    found: set[str] = set()
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise UnsupportedError(f"packed weights are read from safetensors files alone, not from {str(file)!r}")
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  no mapping
                if key.endswith(".weight") and not opened.get_slice(key).get_dtype().startswith(("F", "BF")):
                    found.add(key.removesuffix(".weight"))
    return found


class _Pack(ConversionOps):
    def __init__(self, quantizer: PluginQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **kwargs: Any) -> dict[str, Any]:
        ((_, value),) = input_dict.items()
        weight = value[0] if isinstance(value, list) else value
        path = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(path)
        if tuple(weight.shape) != (module.out_features, module.in_features):
            raise ConfigError(f"{full_layer_name} is {tuple(weight.shape)}, expected {(module.out_features, module.in_features)}")
        packed = self.hf_quantizer.pack(path, module, weight)
        return {f"{path}.{name}": nn.Parameter(tensor, requires_grad=False) for name, tensor in packed.items()}


# -- entering transformers -----------------------------------------------------------------------------------------------


def activate(ledger: Ledger) -> None:
    """Register every quantizer of the catalogue; one that cannot be is reported and left out, the others go on."""
    for entry in list(catalogue().of_kind(Kind.QUANTIZER)):
        try:
            with ledger.transaction():
                register(ledger, entry)
        except Exception as error:
            catalogue().drop(entry, one_line(error), error)
    owner = auto.AutoHfQuantizer
    stock_supports: Any = owner.supports_quant_method
    stock_merge: Any = vars(owner)["merge_quantization_configs"].__func__

    @functools.wraps(stock_supports)
    def supports_quant_method(quantization_config_dict: Any) -> bool:
        if isinstance(quantization_config_dict, QuantizerConfig):
            return True
        if isinstance(quantization_config_dict, Mapping) and (stored := quantization_config_dict.get(artefacts.KEY)) is not None:
            artefacts.check_record(stored, f"the model (quantised with {quantization_config_dict.get('quant_method')!r})")
        return bool(stock_supports(quantization_config_dict))

    @functools.wraps(stock_merge)
    def merge_quantization_configs(cls: Any, /, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        own, asked = quantization_config, quantization_config_from_args
        if isinstance(own, dict) and artefacts.KEY in own:
            own = auto.AutoQuantizationConfig.from_dict(own)
        if not isinstance(own, QuantizerConfig):
            return stock_merge(cls, quantization_config, quantization_config_from_args)
        if isinstance(asked, dict):
            asked = auto.AutoQuantizationConfig.from_dict(asked)
        if asked is not None and type(asked) is not type(own):
            return stock_merge(cls, own, asked)  # refuses
        return own if asked is None else own.with_loading_options(asked)

    ledger.set_attr(owner, "supports_quant_method", staticmethod(supports_quant_method))
    ledger.set_attr(owner, "merge_quantization_configs", classmethod(merge_quantization_configs))


def register(ledger: Ledger, entry: Entry) -> None:
    """Enter one method into the mappings of transformers.

    Raises:
        HfplugError: a requirement is not met, or a class is not what the seam needs.
        LedgerError: the name is taken.
    """
    if cause := entry.unmet():
        raise HfplugError(cause)
    config, quantizer, name = entry.load_config(), entry.load_target(), entry.method.name
    for cls, base in ((config, QuantizerConfig), (quantizer, PluginQuantizer)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise HfplugError(f"{cls!r} must be a subclass of hfplug.quantization.{base.__name__}")
        if getattr(cls, "method", None) != name:
            raise HfplugError(f"{cls.__name__}.method={getattr(cls, 'method', None)!r} must be {name!r}")
    linear = getattr(quantizer, "linear_cls", None)
    if not (isinstance(linear, type) and issubclass(linear, PackedLinear)):
        raise HfplugError(f"{quantizer.__name__}.linear_cls={linear!r} must be a subclass of hfplug.packed.PackedLinear")
    ledger.register(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, name, config, what="quantisation method")
    ledger.register(auto.AUTO_QUANTIZER_MAPPING, name, quantizer, what="quantisation method")
