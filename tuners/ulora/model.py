"""The U-LoRA tuner: which modules it takes, and the state its layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfplug.calls import call_scope, token_stack
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.seams.tuner import PluginTuner
from hfplug.tuners.ulora.layer import ULoraLinear, mean_factors
from hfplug.tuners.ulora.state import ModelState

_ATTRIBUTE = "_hfplug_ulora"


class ULoraModel(PluginTuner):
    """Adapts the linear modules of a model with U-LoRA; made by ``get_peft_model(model, ULoraConfig(...))``."""

    method = "ulora"
    tuner_layer_cls = ULoraLinear

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        causal = peft_config.task_type == "CAUSAL_LM" or type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if peft_config.context == "bidirectional" and causal and not peft_config.force_bidirectional:
            raise ConfigError(
                "context='bidirectional' on a causal language model leaks future tokens in training and differs in generation; "
                "use context='causal', or force_bidirectional=True for a comparison"
            )
        if model_config.get("is_encoder_decoder"):
            raise UnsupportedError("ulora: encoder-decoder models have two token streams with two masks; not supported")
        return super()._prepare_adapter_config(peft_config, model_config)

    def check_target(self, config: Any, key: str, target: nn.Module) -> None:
        stack = token_stack(self.model)
        names = [name for name, module in self.model.named_modules() if module is stack and name]
        if stack is not self.model and not any(key.startswith(f"{name}.") for name in names):
            raise ConfigError(
                f"ulora: target module {key!r} lies outside the token stack ({type(stack).__name__}), where the context "
                "of a token is not defined; remove it from target_modules (exclude_modules helps)"
            )

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        for layer in model.modules():
            if isinstance(layer, ULoraLinear) and layer.ulora_state is None:
                layer.ulora_state = self._state()
                layer.ulora_state.layers.append(layer)

    def _state(self) -> ModelState:
        stack = token_stack(self.model)
        if _ATTRIBUTE not in vars(stack):
            vars(stack)[_ATTRIBUTE] = ModelState(call_scope(self.model))
        return vars(stack)[_ATTRIBUTE]

    lora_differs = "the utilisation of each direction depends on the input; its historical mean is used instead"

    @classmethod
    def to_lora(cls, config: Any, tensors: Mapping[str, torch.Tensor], key: str) -> tuple[torch.Tensor, torch.Tensor]:
        return mean_factors(config, tensors["ulora_A.weight"], tensors["ulora_B.weight"], tensors["ulora_ema"])

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> nn.Module:
        stack = token_stack(self.model)
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        state = vars(stack).pop(_ATTRIBUTE, None)
        if state is not None:
            state.close()
        return model
