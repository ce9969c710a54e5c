"""Tuners: PEFT types of our own, without editing PEFT or its closed enum.

A tuner method ships a config (:class:`PluginConfig`) and a tuner (:class:`PluginTuner`). When PEFT is imported, each is
entered into the four mappings of ``peft.mapping`` under a :class:`PluginPeftType`, a string that offers the enum's
``value`` and ``name``. From there ``get_peft_model``, ``save_pretrained``, ``PeftModel.from_pretrained``,
``model.load_adapter``, ``AutoModelForCausalLM.from_pretrained(adapter_dir)``, TRL's ``peft_config=`` and pickle work as for
a built-in type. Never subclass ``LoraConfig``: such an adapter reloads as plain LoRA where the plugin is missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import peft
import peft.mapping
import torch
from peft.config import PeftConfig, PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin

from hfplug import activation, artefacts, optimization
from hfplug.errors import ConfigError, HfplugError, UnsupportedError, nearest, one_line
from hfplug.ledger import Ledger
from hfplug.method import Kind
from hfplug.options import Checked, build
from hfplug.packed_adapters import backend_of
from hfplug.plugins import Entry, catalogue, load
from hfplug.probing import evaluating, probe_ids

_MAPPINGS = (
    "PEFT_TYPE_TO_CONFIG_MAPPING",
    "PEFT_TYPE_TO_TUNER_MAPPING",
    "PEFT_TYPE_TO_PREFIX_MAPPING",
)


class PluginPeftType(str):
    """A PEFT type outside the closed ``peft.PeftType`` enum, with what PEFT and transformers use of an enum member."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str.__str__(self)

    name = value

    def __repr__(self) -> str:
        return f"<PluginPeftType {self.value!r}>"


@dataclass
class PluginConfig(Checked, PeftConfig):
    """Base of every tuner configuration of a plugin.

    Subclass it as a dataclass, set ``method``, and add the tuner's own options with ``metadata={"help": ...}``.
    """

    method: ClassVar[str]
    hidden_options: ClassVar[tuple[str, ...]] = (*(f.name for f in fields(PeftConfig)), "hfplug")

    target_modules: list[str] | str | None = field(
        default=None,
        metadata={"help": "module names (suffixes), a regex, or 'all-linear'; None: PEFT's default for the architecture"},
    )
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "module names or a regex to leave alone"})
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "layer indices; None: all"})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "name of the layer list, if unusual"})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "modules trained and saved whole"})
    merge_quantized: bool = field(
        default=False, metadata={"help": "allow merging into a quantised base, which rounds the result to its format"}
    )
    hfplug: dict[str, Any] | None = field(
        default=None, metadata={"help": "which plugin, distribution and version wrote this; filled in, do not set"}
    )

    def __post_init__(self) -> None:
        activation.finish()  # the module of this class may have been imported by its full name, before peft
        super().__post_init__()
        self.peft_type = PluginPeftType(self.method.upper())
        stored, entry = self.hfplug, catalogue().get(self.method, Kind.TUNER)
        if stored is not None:
            artefacts.check_record(stored, f"the {self.method} configuration")
            if stored["distribution"] != entry.source.distribution:
                raise ConfigError(
                    f"this {self.method!r} adapter was written by {stored['distribution']} {stored['version']}, but here "
                    f"{self.method!r} is provided by {entry.source}; install the former and disable the latter"
                )
        self.hfplug = artefacts.record(entry)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, set(value))

    def to_dict(self) -> dict[str, Any]:
        """As PEFT's, with sets as sorted lists: the same adapter gives the same file."""
        return {k: sorted(v) if isinstance(v, set) else v for k, v in super().to_dict().items()}


class PluginTuner(BaseTuner):
    """Base of every tuner of a plugin: one layer class for linear modules, checks with clear errors, strict loading.

    Subclasses set ``method`` (also the parameter prefix, with an underscore) and ``tuner_layer_cls``, whose constructor is
    ``(base_layer, adapter_name, config, key)`` and which has ``update_layer(adapter_name, config)``. Its name must contain
    "Linear": by that PEFT finds it again when a second adapter says ``target_modules="all-linear"``.
    """

    method: ClassVar[str]
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "method" in vars(cls):
            cls.prefix = f"{cls.method}_"

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(m, self.tuner_layer_cls) and adapter_name in m._all_available_adapter_names() for m in model.modules()):
            raise ConfigError(
                f"{self.method}: the model already has an adapter {adapter_name!r}, whose weights would be initialised again; "
                "choose another adapter_name, or delete that one first"
            )
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)

    def check_target(self, config: Any, key: str, target: nn.Module) -> None:
        """Refuse a target module by raising; called before anything is changed."""

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's, but an adapter that is refused, at whichever module, leaves the model and its other adapters as before."""
        config = self.peft_config[adapter_name]
        trainable = [(p, p.requires_grad) for p in model.parameters()]
        try:
            if config.target_modules not in (None, "all-linear"):
                self._check_targets(model, config)
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except Exception:
            self.peft_config.pop(adapter_name, None)
            self._take_back(model, adapter_name)
            for parameter, requires_grad in trainable:
                parameter.requires_grad_(requires_grad)
            raise
        if adapter_name == "ref" and config is self.peft_config.get("default"):
            self._copy_buffers(model, "default", "ref")

    def _take_back(self, model: nn.Module, adapter_name: str) -> None:
        for name, layer in list(model.named_modules()):
            if not isinstance(layer, self.tuner_layer_cls):
                continue
            if set(layer._all_available_adapter_names()) <= {adapter_name}:
                parent, _, child = name.rpartition(".")
                model.get_submodule(parent)._modules[child] = layer.base_layer
            else:
                layer.delete_adapter(adapter_name)

    @staticmethod
    def _copy_buffers(model: nn.Module, source: str, target: str) -> None:
        # TRL's trainers keep the reference of a trained adapter as a second adapter "ref" made from the same config object,
        # and copy the parameters into it by name, but no buffers: the reference would not be the policy it starts from.
        buffers = dict(model.named_buffers())
        for name, value in buffers.items():
            parts = name.split(".")
            for place in {len(parts) - 1, len(parts) - 2}:
                if parts[place] == source:
                    twin = buffers.get(".".join([*parts[:place], target, *parts[place + 1 :]]))
                    if twin is not None:
                        twin.copy_(value)

    def _check_targets(self, model: nn.Module, config: Any) -> None:
        from peft.tuners.tuners_utils import NoMatchingPeftModuleError

        names = [name for name, _ in model.named_modules() if name and f".{self.prefix}" not in f".{name}"]
        matched = [name for name in names if self._check_target_module_exists(config, name)]
        if not matched and not getattr(config, "target_parameters", None):
            targets = config.target_modules
            wanted = [targets] if isinstance(targets, str) else sorted(targets)
            suffixes = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
            raise NoMatchingPeftModuleError(
                f"{self.method}: target_modules={wanted} match no module of {type(model).__name__}"
                f"{nearest(wanted[0], suffixes)}; module names: {suffixes}"
            )
        for name in matched:
            self.check_target(config, name, model.get_submodule(name))

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        if isinstance(target, self.tuner_layer_cls):
            target.update_layer(adapter_name, peft_config)
            return
        self.check_target(peft_config, current_key, target)
        layer = self.tuner_layer_cls(target, adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    # -- merging ------------------------------------------------------------------------------------------------------

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """As PEFT's; where the base is quantised, a warning says how far the logits moved on a probe."""
        self._check_merge(adapter_names)
        with self._measured():
            super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        if merge:
            self._check_merge(adapter_names)
        with self._measured() if merge else contextlib.nullcontext():
            return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    def _check_merge(self, adapter_names: list[str] | None) -> None:
        # Every layer before any: a model with half of its layers merged is neither one thing nor the other.
        self._check_merge_allowed()
        for name in self.active_adapters if adapter_names is None else adapter_names:
            for layer in self.model.modules():
                if isinstance(layer, self.tuner_layer_cls) and name in layer._all_available_adapter_names():
                    self._check_tied(layer)
                    self.check_merge(layer, name)

    def _check_tied(self, layer: Any) -> None:
        embeddings = getattr(self.model, "get_input_embeddings", lambda: None)()
        if embeddings is not None and getattr(layer.get_base_layer(), "weight", None) is getattr(embeddings, "weight", 0):
            raise UnsupportedError(
                f"{self.method}: a target module is tied to the input embeddings, so merging into it would change those too; "
                "untie it first (a copy of the weight, and config.tie_word_embeddings = False), or leave it out of target_modules"
            )

    def check_merge(self, layer: Any, adapter_name: str) -> None:
        """Refuse to merge an adapter of a layer by raising; called for every layer before any weight is changed."""
        if hasattr(layer, "check_merge"):
            layer.check_merge(adapter_name, self.peft_config[adapter_name])
        elif backend_of(layer.get_base_layer()) is not None:
            raise UnsupportedError(
                f"{self.method}: merging into a quantised base is not supported by this tuner, whatever merge_quantized says"
            )

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        layers = [m for m in self.model.modules() if isinstance(m, self.tuner_layer_cls)]
        lossy = any(layer.quantization_backend is not None for layer in layers)
        before = self._probe() if lossy else None
        yield
        if lossy:
            after = self._probe()
            how = "this model cannot be probed with token ids"
            if before is not None and after is not None:
                how = f"on a probe of {before.shape[1]} tokens the logits moved by up to {(after - before).abs().max():.3g}"
            warnings.warn(f"{self.method}: merged into a quantised base, which rounds the result; {how}", stacklevel=4)

    def _probe(self) -> Any:
        ids = probe_ids(self.model, 1, 16)
        if ids is None:
            return None
        with evaluating(self.model):
            return getattr(self.model(input_ids=ids), "logits", None)

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # PEFT drops adapter_names= in silence for tuners without such hooks: every row would go through the active adapter.
        if kwargs.get("adapter_names") is not None:
            raise UnsupportedError(f"{self.method}: adapter_names= (another adapter for each row) is not supported")
        yield

    @classmethod
    def to_lora(cls, config: Any, tensors: Mapping[str, torch.Tensor], key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What one module of a saved adapter does at inference, as the factors of a plain LoRA.

        Args:
            config: the adapter's configuration.
            tensors: the saved tensors of the module, by name within the layer (``"ulora_A.weight"``).
            key: the module's name in the base model.

        Returns:
            ``A`` ``(r, in)`` and ``B`` ``(out, r)`` with all scaling in ``B``, float32 or wider.

        Raises:
            UnsupportedError: the tuner is not low-rank at inference, saying what can be done instead.
        """
        raise UnsupportedError(f"{cls.method} adapters cannot be expressed as a plain LoRA")

    lora_differs: ClassVar[str | None] = None
    """Why the result of :meth:`to_lora` is an approximation; ``None``: it is exact."""

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        cls.check_keys(model, adapter_name, set(remapped))
        return remapped

    @classmethod
    def check_keys(cls, model: nn.Module, adapter_name: str, loaded: set[str]) -> None:
        """Refuse a checkpoint with tensors the adapter does not have, or without some it has.

        Raises:
            ConfigError: naming the first such tensor.
        """
        own = re.compile(rf"(^|\.){re.escape(cls.prefix)}")
        known = {k for k in model.state_dict() if own.search(k)}
        if unknown := sorted(k for k in loaded if own.search(k) and k not in known):
            raise ConfigError(
                f"the checkpoint has {len(unknown)} tensors that this {cls.method} adapter does not, first {unknown[0]!r}"
                f"{nearest(unknown[0], known)}; was it saved with another configuration or version?"
            )
        needed = {k for k in known if re.search(rf"\.{re.escape(adapter_name)}(\.[^.]+)?$", k)}
        if missing := sorted(needed - loaded):
            raise ConfigError(f"the checkpoint lacks {len(missing)} tensors of this {cls.method} adapter, first {missing[0]!r}")


# -- entering PEFT -----------------------------------------------------------------------------------------------------


def activate(ledger: Ledger) -> None:
    """Register every tuner of the catalogue with PEFT; one that cannot be is reported and left out, the others go on."""
    for entry in list(catalogue().of_kind(Kind.TUNER)):
        try:
            with ledger.transaction():
                _register(ledger, entry)
        except Exception as error:
            catalogue().drop(entry, one_line(error), error)
    optimization.follow_steps(ledger)
    # PEFT and transformers both read adapter_config.json here, before they look the type up and raise a bare KeyError.
    stock: Any = vars(PeftConfigMixin)["from_json_file"].__func__

    def from_json_file(cls: Any, /, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        loaded = stock(cls, path_json_file, **kwargs)
        _check_loaded(loaded)
        return loaded

    ledger.set_attr(PeftConfigMixin, "from_json_file", classmethod(from_json_file))
    stock_card: Any = peft.PeftModel.create_or_update_model_card

    @functools.wraps(stock_card)
    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        stock_card(self, output_dir)
        _write_card(self.peft_config, Path(output_dir) / "README.md")

    ledger.set_attr(peft.PeftModel, "create_or_update_model_card", create_or_update_model_card)
    stock_load: Any = PeftAdapterMixin.load_adapter
    signature = inspect.signature(stock_load)

    @functools.wraps(stock_load)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        info = stock_load(self, *args, **kwargs)
        _check_loading_info(self, signature.bind(self, *args, **kwargs).arguments.get("adapter_name") or "default", info)
        return info

    ledger.set_attr(PeftAdapterMixin, "load_adapter", load_adapter)


def _register(ledger: Ledger, entry: Entry) -> None:
    if cause := entry.unmet():
        raise HfplugError(cause)
    config, tuner, name = entry.load_config(), entry.load_target(), entry.method.name
    for cls, base in ((config, PluginConfig), (tuner, PluginTuner)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise HfplugError(f"{cls!r} must be a subclass of hfplug.seams.tuner.{base.__name__}")
        if getattr(cls, "method", None) != name:
            raise HfplugError(f"{cls.__name__}.method={getattr(cls, 'method', None)!r} must be {name!r}")
    if "Linear" not in tuner.tuner_layer_cls.__name__:
        name = tuner.tuner_layer_cls.__name__
        raise HfplugError(f"the layer class {name} must have 'Linear' in its name: PEFT finds layers of 'all-linear' by it")
    taken = {prefix: peft_type for peft_type, prefix in peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING.items()}
    if tuner.prefix in taken:
        raise HfplugError(f"the parameter prefix {tuner.prefix!r} of {tuner.__name__} already belongs to {taken[tuner.prefix]!r}")
    key = PluginPeftType(name.upper())
    for mapping, value in zip(_MAPPINGS, (config, tuner, tuner.prefix), strict=True):
        ledger.register(getattr(peft.mapping, mapping), key, value, what="PEFT type")


_LOAD = """import hfplug
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER_OR_REPOSITORY")"""


def _write_card(configs: Mapping[str, Any], path: Path) -> None:
    config = next((c for c in configs.values() if isinstance(c, PluginConfig)), None)
    if config is not None and config.hfplug is not None:
        options = {k: v for k, v in config.to_dict().items() if k not in config.hidden_options and v is not None}
        artefacts.update_card(path, config.hfplug, _LOAD, options)


def _check_loading_info(model: Any, adapter_name: str, info: Any) -> None:
    # transformers loads adapters by a path of its own and prints a table of what did not fit; the model would go on with it.
    config = model.peft_config[adapter_name]
    if isinstance(config, PluginConfig):
        cls: type[PluginTuner] = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
        loaded = (set(model.state_dict()) - set(info.missing_keys)) | set(info.unexpected_keys)
        cls.check_keys(model, adapter_name, loaded)


def _check_loaded(loaded: Mapping[str, Any]) -> None:
    stored = loaded.get(artefacts.KEY)
    if stored is None:
        return
    artefacts.check_record(stored, f"the adapter (peft_type {loaded.get('peft_type')!r})")
    known = {f.name for f in fields(catalogue().get(stored["plugin"], Kind.TUNER).load_config())}
    if unknown := sorted(set(loaded) - known - {artefacts.PATCHES}):
        raise ConfigError(
            f"adapter_config.json has the option {unknown[0]!r}{nearest(unknown[0], known)} that {stored['plugin']!r} of this "
            f"installation does not know; it was written by {stored['distribution']} {stored['version']}: upgrade it"
        )


def config(type: str, **options: Any) -> Any:
    """Build a tuner configuration by name: ``hfplug.tuners.config(type="ulora", r=8)``.

    Raises:
        ConfigError: no such tuner, unknown option, or wrong value; the message names the nearest valid one.
    """
    load(type, Kind.TUNER)
    return build(catalogue().get(type, Kind.TUNER).load_config(), options, where=f"tuner {type!r}")


def tuner_layers(model: nn.Module, method: str) -> Iterable[tuple[str, BaseTunerLayer]]:
    """``(name, layer)`` of every layer that a tuner method put into a model, whichever way it was injected."""
    cls = load(method, Kind.TUNER).tuner_layer_cls
    return ((name, module) for name, module in model.named_modules() if isinstance(module, cls))
