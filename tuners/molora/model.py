"""The MoLoRA tuner: reads the experts, checks that they fit, and puts them into the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfplug.calls import call_scope, token_stack
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.positions import decoder_layers
from hfplug.seams.tuner import PluginTuner
from hfplug.tuners.molora.config import MoLoraConfig
from hfplug.tuners.molora.experts import Expert, Factors, check_bases, check_fit, read_expert, unpack
from hfplug.tuners.molora.layer import MoLoraLinear
from hfplug.tuners.molora.plan import make_plan, plan_of
from hfplug.tuners.molora.state import ModelState

_ATTRIBUTE = "_hfplug_molora"


class MoLoraModel(PluginTuner):
    """Routes the tokens of a model through trained LoRA adapters; made by ``get_peft_model(model, MoLoraConfig(...))``."""

    method = "molora"
    tuner_layer_cls = MoLoraLinear

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config: MoLoraConfig = self.peft_config[adapter_name]
        before = {k: config.__dict__.get(k) for k in ("experts", "target_modules", "_sources", "_plan")}
        try:
            experts = resolve(config, model)
            self._plan(config, experts, model)
        except Exception:
            # As the base class does for what it refuses itself: nothing of the adapter stays.
            self.peft_config.pop(adapter_name, None)
            config.__dict__.update(before)
            raise
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
            self._state(model)
        except Exception:
            config.__dict__.update(before)
            raise
        self.__dict__.setdefault("_hfplug_factors", {})[adapter_name] = {n: e.factors for n, e in experts.items()}
        self._fill(adapter_name)

    def _plan(self, config: MoLoraConfig, experts: dict[str, Expert], model: nn.Module) -> None:
        config.__dict__["experts"] = {name: experts[name].record() for name in config.names}
        union = {module for expert in experts.values() for module in expert.modules}
        if config.target_modules in (None, "all-linear"):
            config.target_modules = set(union)  # type: ignore[assignment]
        named = [name for name, _ in model.named_modules() if name in union]
        targets = [name for name in named if self._check_target_module_exists(config, name)]
        config.__dict__["_plan"] = make_plan(config, experts, targets, model)

    def check_target(self, config: Any, key: str, target: nn.Module) -> None:
        if not any(key in modules for modules in plan_of(config).modules.values()):
            raise ConfigError(
                f"molora: target module {key!r} is adapted by none of the experts {list(config.names)}; target_modules may only "
                "narrow down what they adapt (None: all of it)"
            )

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        # Filled again: on a half-precision base the first filling was rounded to its dtype, and is float32 only now.
        self._fill(adapter_name)
        self.__dict__.get("_hfplug_factors", {}).pop(adapter_name, None)

    def _fill(self, adapter_name: str) -> None:
        factors: dict[str, Factors] = self.__dict__.get("_hfplug_factors", {}).get(adapter_name, {})
        for layer in self.model.modules():
            if isinstance(layer, MoLoraLinear) and adapter_name in layer.molora_experts:
                fill(layer, adapter_name, factors)

    def _state(self, model: nn.Module) -> None:
        stack = token_stack(self.model)
        if _ATTRIBUTE not in stack.__dict__:
            stack.__dict__[_ATTRIBUTE] = ModelState(call_scope(self.model))
        state: ModelState = stack.__dict__[_ATTRIBUTE]
        for layer in model.modules():
            if isinstance(layer, MoLoraLinear) and layer.molora_state is None:
                layer.molora_state = state
                state.layers.append(layer)
        state.changed()
        if hasattr(stack, "config"):
            state.follow(self.model, list(decoder_layers(stack)))

    @classmethod
    def to_lora(cls, config: Any, tensors: Mapping[str, torch.Tensor], key: str) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedError(
            f"a molora adapter sends every token through one of {list(config.names)}, so no single LoRA does what it does; use "
            "the folders of these LoRA adapters themselves, or hfplug.tuners.merge_single(model, expert)"
        )

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> nn.Module:
        stack = token_stack(self.model)
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        state = stack.__dict__.pop(_ATTRIBUTE, None)
        if state is not None:
            state.close()
        return model


def resolve(config: MoLoraConfig, model: nn.Module) -> dict[str, Expert]:
    """The experts of a configuration, read from their folders or unpacked from their records, checked against the model.

    Raises:
        ConfigError: one is not usable, does not fit the model, or is not what its record says.
    """
    experts = {}
    sources: dict[str, str] = dict(config.__dict__.get("_sources") or {})
    for name, value in config.experts.items():
        if isinstance(value, (str, Path)):
            experts[name] = read_expert(name, value)
            sources[name] = str(value)
        elif isinstance(value, dict):
            experts[name] = unpack(name, value)
            if Path(sources.get(name, "")).is_dir() and name in sources:  # the same configuration for a second adapter
                again = read_expert(name, sources[name])
                if again.sha256 != experts[name].sha256:
                    raise ConfigError(
                        f"expert {name!r}: {sources[name]} was changed since it was read: sha256 {again.sha256} instead of "
                        f"{experts[name].sha256}"
                    )
                experts[name] = again
        else:
            raise ConfigError(f"experts[{name!r}]={value!r} must be the folder or hub id of a LoRA adapter")
    if not config.allow_other_base:
        check_bases(experts, model)
    for name, expert in experts.items():
        check_fit(name, expert, model)
    config.__dict__["_sources"] = sources
    return experts


def fill(layer: MoLoraLinear, adapter_name: str, factors: dict[str, Factors]) -> None:
    """Write the factors of a layer's experts into its parameters; those on the meta device wait for a checkpoint."""
    with torch.no_grad():
        for expert, modules in factors.items():
            if layer.key in modules and expert in layer.molora_scaling[adapter_name]:
                pair = layer.molora_experts[adapter_name].pair(expert)
                for parameter, value in zip(pair, modules[layer.key], strict=True):
                    if not parameter.is_meta:
                        parameter.copy_(value)
