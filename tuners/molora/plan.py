"""Which modules an adapter touches and which of them hold a router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfplug.calls import token_stack
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.positions import decoder_layers
from hfplug.tuners.molora.config import MoLoraConfig
from hfplug.tuners.molora.experts import Expert, Modules


@dataclass(frozen=True)
class Plan:
    """Where the parts of one adapter go; derived from its configuration and the model, never saved.

    Attributes:
        modules: expert -> the modules it adapts, with rank and scaling.
        targets: the modules that are adapted, in the order of the model.
        hosts: module that holds a router -> index of its decoder layer (-1: none, scope "module").
        layers: target -> index of its decoder layer (-1: outside).
        features: size of the hidden state.
    """

    modules: Mapping[str, Modules]
    targets: tuple[str, ...]
    hosts: Mapping[str, int]
    layers: Mapping[str, int]
    features: int


def plan_of(config: MoLoraConfig) -> Plan:
    """The plan made when the adapter was."""
    found: Plan = config.__dict__["_plan"]
    return found


def make_plan(config: MoLoraConfig, experts: Mapping[str, Expert], targets: list[str], model: nn.Module) -> Plan:
    """Assign targets to decoder layers and choose the modules that hold routers: the first target of each layer.

    Raises:
        UnsupportedError: a target where the tokens of the model are not at hand.
        ConfigError: ``router_layer`` is no layer with a target.
    """
    stack = token_stack(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside = names.get(id(stack), "")
    own_scope = config.router == "learned" and config.router_scope == "module"
    layers = [names[id(layer)] for layer in decoder_layers(stack)] if not own_scope else []
    indices: dict[str, int] = {}
    for key in targets:
        if not own_scope and inside and not key.startswith(f"{inside}."):
            raise UnsupportedError(
                f"molora: {key!r} lies outside the token stack ({type(stack).__name__}), where a token has no decision; leave it "
                "out of target_modules (exclude_modules helps), or use router_scope='module'"
            )
        indices[key] = next((i for i, layer in enumerate(layers) if key.startswith(f"{layer}.")), -1)
        if config.router == "learned" and not own_scope and indices[key] < 0:
            raise UnsupportedError(f"molora: {key!r} is in no decoder layer of {type(stack).__name__}; use router_scope='module'")
    hosts: dict[str, int] = {}
    if own_scope:
        hosts = dict.fromkeys(targets, -1)
    elif config.router == "learned":
        for key in targets:
            if indices[key] not in hosts.values():
                hosts[key] = indices[key]
        if config.router_scope == "model":
            hosts = {key: index for key, index in hosts.items() if index == config.router_layer}
            if not hosts:
                raise ConfigError(
                    f"router_layer={config.router_layer} is none of the decoder layers with adapted modules: "
                    f"{sorted(set(indices.values()))}"
                )
    model_config: Any = getattr(stack, "config", None)
    features = model_config.get_text_config().hidden_size if model_config is not None and not own_scope else 0
    return Plan({name: expert.modules for name, expert in experts.items()}, tuple(targets), hosts, indices, features)
