"""The MoLoRA layer around a linear module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.tuners.linear import TunerLinear
from hfplug.tuners.molora.config import MoLoraConfig
from hfplug.tuners.molora.dispatch import add_deltas, straight_through
from hfplug.tuners.molora.plan import plan_of
from hfplug.tuners.molora.router import Router
from hfplug.tuners.molora.state import Forced, ModelState


class ExpertFactors(nn.Module):
    """``<name>_A`` and ``<name>_B`` of every expert that adapts a module: parameters that never require a gradient."""

    def add(self, name: str, rank: int, in_features: int, out_features: int) -> None:
        """Make room for an expert. NaN until its tensors arrive, so that an expert without them cannot go unseen."""
        for letter, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            self.register_parameter(f"{name}_{letter}", nn.Parameter(torch.full(shape, float("nan")), requires_grad=False))

    def remove(self, name: str) -> None:
        """Drop an expert; nothing happens where it does not adapt the module."""
        for letter in "AB":
            self._parameters.pop(f"{name}_{letter}", None)

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of an expert."""
        return getattr(self, f"{name}_A"), getattr(self, f"{name}_B")

    def filled(self) -> bool:
        """Whether the tensors of every expert have arrived."""
        return not any(bool(p.reshape(-1)[0].isnan()) for p in self.parameters())


class MoLoraLinear(TunerLinear):
    """``W0·x_t + w_t·s_k·B_k·A_k·x_t`` with an expert ``k`` per token, for ``nn.Linear``, ``Conv1D`` and quantised linears.

    Shapes: input ``(batch, tokens, in_features)``. One module of each decoder layer holds that layer's router.

    Attributes:
        rows: rows that went through a ``lora_A`` since :meth:`reset_rows`; recomputation in backward counts again.
    """

    method = "molora"
    # Only the router stands in adapter_layer_names, whose parameters PEFT makes trainable at every switch.
    adapter_layer_names = ("molora_router",)
    other_param_names = ("molora_experts", "molora_scaling", "molora_config", "molora_stacks")
    molora_state: ModelState | None = None

    def make_containers(self) -> None:
        self.molora_router = nn.ModuleDict()
        self.molora_experts: Any = nn.ModuleDict()
        self.molora_scaling: dict[str, dict[str, float]] = {}
        self.molora_config: dict[str, MoLoraConfig] = {}
        self.molora_stacks: dict[str, dict[Any, Any]] = {}
        self._counter = {"rows": 0}
        self._seen_filled: dict[str, bool] = {}

    def update_layer(self, adapter_name: str, config: MoLoraConfig) -> None:
        """Add an adapter: its experts, still empty, and the router if this module holds one."""
        plan = plan_of(config)
        experts = ExpertFactors()
        for name, modules in plan.modules.items():
            if self.key in modules:
                experts.add(name, modules[self.key][0], self.in_features, self.out_features)
        self.molora_experts[adapter_name] = experts
        self.molora_scaling[adapter_name] = {n: m[self.key][1] for n, m in plan.modules.items() if self.key in m}
        self.molora_config[adapter_name] = config
        self.molora_stacks[adapter_name] = {}
        self._seen_filled.pop(adapter_name, None)
        if self.key in plan.hosts:
            features = self.in_features if config.router_scope == "module" else plan.features
            self.molora_router[adapter_name] = Router(features, config.router_hidden, len(config.slots), spread=config.spread)
        self.place(adapter_name)

    def holds(self, name: str) -> bool:
        return name in self.molora_experts

    @property
    def rows(self) -> int:
        return self._counter["rows"]

    def reset_rows(self) -> None:
        """Start counting rows anew."""
        self._counter["rows"] = 0

    # -- forward ----------------------------------------------------------------------------------------------------------

    def adapted(self, name: str, x: Tensor, result: Tensor) -> Tensor:
        self._check_filled(name)
        if self.molora_state is None:
            raise UnsupportedError(f"molora: {self.key!r} is not part of a model that was adapted as a whole")
        decision = self.molora_state.decide(self, name, x)
        if decision is None:
            return result
        experts, scaling = self.molora_experts[name], self.molora_scaling[name]
        if isinstance(decision, Forced):
            if decision.expert not in scaling:
                return result
            a, b = experts.pair(decision.expert)
            self._counter["rows"] += x.numel() // x.shape[-1]
            return result + linear(linear(self._cast_input_dtype(x, a.dtype), a), b) * scaling[decision.expert]
        if decision.index.shape[:-1] != x.shape[:-1]:
            raise UnsupportedError(
                f"molora: {self.key!r} sees tokens of shape {tuple(x.shape[:-1])}, the decision was made for "
                f"{tuple(decision.index.shape[:-1])}; leave modules that work on another sequence out of target_modules"
            )
        factors = {expert: (*experts.pair(expert), scale) for expert, scale in scaling.items()}
        result, rows = add_deltas(result, x, decision, factors, self.molora_stacks[name])
        self._counter["rows"] += rows
        if decision.probabilities is not None and torch.is_grad_enabled():
            result, rows = straight_through(result, x, decision, factors)
            self._counter["rows"] += rows
        if name in self.molora_router and decision.learns is not None:
            # All tokens may have gone to the null expert; DDP waits for a gradient of every parameter, so there is one: zero.
            result = result + (decision.learns.sum() * 0).to(result.dtype)
        return result

    def _check_filled(self, name: str) -> None:
        if not self._seen_filled.get(name):
            if not self.molora_experts[name].filled():
                raise ConfigError(
                    f"molora: adapter {name!r} has no tensors for its experts at {self.key!r} (or they are NaN). A "
                    "configuration read from a saved adapter holds records only: load it with its weights, or give folders"
                )
            parts = [self.molora_experts[name], *([self.molora_router[name]] if name in self.molora_router else [])]
            for parameter in (p for part in parts for p in part.parameters()):
                # transformers maps the file into memory: addresses no allocator gives, with which small products round
                # differently. Copied, a loaded adapter answers like the saved one to the last bit.
                if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                    parameter.data = parameter.data.clone()
            self._seen_filled[name] = True

    # -- merge ------------------------------------------------------------------------------------------------------------

    def expert_delta(self, name: str, expert: str) -> Tensor | None:
        """``s·B·A`` of one expert in the layout of the base weight, float32 or wider; ``None`` where it adapts nothing."""
        if expert not in self.molora_scaling.get(name, {}):
            return None
        a, b = self.molora_experts[name].pair(expert)
        wide = torch.promote_types(a.dtype, torch.float32)
        delta: Tensor = b.to(wide) @ a.to(wide) * self.molora_scaling[name][expert]
        return delta.T if isinstance(self.get_base_layer(), Conv1D) else delta

    def check_merge(self, name: str, config: MoLoraConfig) -> None:
        """Refused: which expert a token goes through depends on the input."""
        raise UnsupportedError(
            "molora: which expert a token goes through depends on the input, so the adapter cannot be merged; "
            "hfplug.tuners.merge_single(model, expert) merges one expert for all tokens"
        )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused, as :meth:`check_merge`."""
        for name in adapter_names or self.active_adapters:
            if self.holds(name):
                self.check_merge(name, self.molora_config[name])

    def merge_expert(self, name: str, expert: str) -> None:
        """Add one expert's :meth:`expert_delta` to the base weight."""
        delta = self.expert_delta(name, expert)
        if delta is not None:
            weight = self.get_base_weight()
            self.set_base_weight((weight + delta.to(weight.device)).to(weight.dtype))
