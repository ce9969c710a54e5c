"""The Bayesian LoRA tuner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfplug.errors import UnsupportedError
from hfplug.seams.tuner import PluginTuner
from hfplug.tuners.bayes_lora.layer import BayesLoraLinear, mean_factors
from hfplug.tuners.bayes_lora.state import ModelState, factor_kl


class BayesLoraModel(PluginTuner):
    """Adapts the linear modules of a model with Bayesian LoRA; made by ``get_peft_model(model, BayesLoraConfig(...))``."""

    method = "bayes_lora"
    tuner_layer_cls = BayesLoraLinear

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        layers = [layer for layer in model.modules() if isinstance(layer, BayesLoraLinear)]
        state = next((layer.bayes_lora_state for layer in layers if layer.bayes_lora_state is not None), None) or ModelState()
        for layer in layers:
            layer.bayes_lora_state = state
        state.layers = layers

    def check_merge(self, layer: Any, adapter_name: str) -> None:
        if self.peft_config[adapter_name].eval_mode != "mean":
            raise UnsupportedError(
                f"bayes_lora: only the mean can be merged, but adapter {adapter_name!r} evaluates a sample; set "
                f"model.peft_config[{adapter_name!r}].eval_mode = 'mean' first"
            )
        if layer.bayes_lora_state is not None and isinstance(layer.bayes_lora_state.chosen, int):
            raise UnsupportedError("bayes_lora: only the mean can be merged; leave the posterior(model, sample=...) block first")
        super().check_merge(layer, adapter_name)

    @classmethod
    def to_lora(cls, config: Any, tensors: Mapping[str, torch.Tensor], key: str) -> tuple[torch.Tensor, torch.Tensor]:
        if config.eval_mode != "mean":
            raise UnsupportedError(
                "bayes_lora: only the mean can be exported, but this adapter evaluates a sample; save it with eval_mode='mean'"
            )
        return mean_factors(config, tensors["bayes_lora_A.weight"], tensors["bayes_lora_B.weight"])

    def kl_loss(self) -> torch.Tensor:
        """KL of every active adapter from its prior, in nats, 0-d float64 with gradient: for a training loop of one's own.

        Multiply it by ``1 / train_size`` and add it to a mean loss, with ``kl_weight=0`` in the configuration, which would
        add it before the optimizer step otherwise.
        """
        total = torch.zeros((), dtype=torch.float64)
        for layer in self.model.modules():
            if not isinstance(layer, BayesLoraLinear):
                continue
            for name in layer.active_adapters:
                for factor, mean, rho in layer.factors(name) if layer.holds(name) else ():
                    wide = torch.promote_types(mean.dtype, torch.float32)
                    total = total + factor_kl(layer, name, factor, mean.to(wide), rho.rho.to(wide)).double()
        return total
