"""What users do with a MoLoRA model: give decisions, add, remove and merge experts, keep the router in its own file."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.tuners.linear import TunerLinear
from hfplug.tuners.molora.config import MoLoraConfig
from hfplug.tuners.molora.experts import check_bases, check_fit, read_expert, unpack
from hfplug.tuners.molora.layer import MoLoraLinear
from hfplug.tuners.molora.model import fill
from hfplug.tuners.molora.plan import Plan, make_plan, plan_of
from hfplug.tuners.molora.router import Router
from hfplug.tuners.molora.state import Forced, Given, ModelState

_FORMAT = "hfplug molora router 1"


def _layers(model: nn.Module, adapter: str | None = None) -> list[MoLoraLinear]:
    layers = [m for m in model.modules() if isinstance(m, MoLoraLinear)]
    known = sorted({name for layer in layers for name in layer.molora_experts})
    if not known:
        raise ConfigError(f"{type(model).__name__} has no molora adapter")
    if adapter is not None and adapter not in known:
        raise ConfigError(f"adapter={adapter!r} is none of the molora adapters of this model: {known}")
    return [layer for layer in layers if adapter is None or adapter in layer.molora_experts]


def _configs(model: nn.Module) -> dict[str, MoLoraConfig]:
    return {name: config for layer in _layers(model) for name, config in layer.molora_config.items()}


# -- decisions from outside -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def routing(model: nn.Module, *, adapter_ids: Any = None, expert: str | None = "") -> Iterator[None]:
    """Decide in place of the router while the block runs.

    Args:
        model: a model with molora adapters.
        adapter_ids: ``(batch, tokens)`` int64, 0 for the base model and ``1 + i`` for the i-th expert in the order of their
            names; or, for each row, an expert's name (``None``: base) or a list with one for each token. In ``generate``
            the last column stands for every token that is generated; beams of a row share its decisions.
        expert: all tokens through this one (``None``: the base model), on the whole batch: bit for bit that LoRA in PEFT.

    Raises:
        ConfigError: not exactly one of the two is given, an unknown expert, or ids out of range.
    """
    configs = _configs(model)
    if (adapter_ids is None) == (expert == ""):
        raise ConfigError("routing: give either adapter_ids= or expert=")
    if adapter_ids is None:
        for config in configs.values():
            config.check_expert(expert, "routing(expert=)")
        given = Given(Forced(expert))
    else:
        given = Given(ids={name: _as_ids(adapter_ids, config) for name, config in configs.items()})
    state: ModelState = _layers(model)[0].molora_state  # type: ignore[assignment]
    state.given.append(given)
    try:
        yield
    finally:
        state.given.pop()


def _as_ids(adapter_ids: Any, config: MoLoraConfig) -> Tensor:
    slots = {name: slot for slot, name in enumerate((None, *config.names))}

    def slot(name: Any) -> int:
        config.check_expert(name, "routing(adapter_ids=)")
        return slots[name]

    if not isinstance(adapter_ids, Tensor):
        rows: list[Any] = [row if isinstance(row, Sequence) and not isinstance(row, str) else [row] for row in adapter_ids]
        if not rows or len({len(row) for row in rows}) != 1:
            raise ConfigError("routing: adapter_ids must name an expert for each row, or for each token of rows of one length")
        adapter_ids = torch.tensor([[slot(name) for name in row] for row in rows])
    if adapter_ids.dtype != torch.int64 or adapter_ids.dim() != 2 or not adapter_ids.numel():
        raise ConfigError(
            f"routing: adapter_ids is {tuple(adapter_ids.shape)} of {adapter_ids.dtype}; it must be (batch, tokens) int64"
        )
    low, high = int(adapter_ids.min()), int(adapter_ids.max())
    if low < 0 or high >= len(slots):
        raise ConfigError(f"routing: adapter_ids go from {low} to {high}; allowed: 0 (base) to {len(slots) - 1}: {config.names}")
    return adapter_ids.cpu()


# -- experts come and go --------------------------------------------------------------------------------------------------


def add_expert(model: nn.Module, name: str, source: str | Path, *, adapter: str = "default", bias: float = -math.inf) -> None:
    """Add an expert to an adapter; the router's rows of the others stay as they are.

    Args:
        model: a model with a molora adapter.
        name: the new expert's name.
        source: folder or hub id of its LoRA adapter.
        adapter: which molora adapter of the model.
        bias: of the new row of a learned router, whose weights start at zero. ``-inf`` (default): it never wins, so no
            decision changes, and it cannot learn either; a finite value lets it compete and be trained.

    Raises:
        ConfigError: the name is taken, or the expert does not fit; nothing is changed then.
    """
    layers = _layers(model, adapter)
    config = layers[0].molora_config[adapter]
    if name in config.experts:
        raise ConfigError(f"add_expert: {name!r} is already an expert of adapter {adapter!r}: {list(config.names)}")
    type(config)(experts={name: source})  # a name that would be refused
    expert, root = read_expert(name, source), _root(layers, model)
    if not config.allow_other_base:
        check_bases({name: expert}, root)
    check_fit(name, expert, root)
    keys = {layer.key for layer in layers}
    if outside := sorted(set(expert.modules) - keys):
        raise UnsupportedError(
            f"add_expert: {name!r} adapts {len(outside)} modules that no expert of adapter {adapter!r} does, first "
            f"{outside[0]!r}; make a new adapter from all the folders"
        )
    old = config.slots
    config.experts = {n: {**config.experts, name: expert.record()}[n] for n in sorted([*config.experts, name])}
    _replan(config, layers, root)
    for layer in layers:
        if layer.key in expert.modules:
            experts = layer.molora_experts[adapter]
            rank, scaling = expert.modules[layer.key]
            experts.add(name, rank, layer.in_features, layer.out_features)
            like = layer.get_base_layer().weight if len(experts._parameters) == 2 else next(experts.parameters())
            dtype = like.dtype if like.dtype.is_floating_point else torch.float32
            experts.to(like.device)
            for letter in "AB":
                parameter = getattr(experts, f"{name}_{letter}")
                parameter.data = parameter.data.to(like.device, dtype)
            layer.molora_scaling[adapter][name] = scaling
        if adapter in layer.molora_router:
            _remap(layer.molora_router[adapter], old, config.slots, bias)  # type: ignore[arg-type]
        fill(layer, adapter, {name: expert.factors})


def remove_expert(model: nn.Module, name: str, *, adapter: str = "default") -> None:
    """Take an expert out of an adapter; tokens it would have won go to the next best.

    Raises:
        ConfigError: there is no such expert, it is the last one, or the vocabulary names it.
    """
    layers = _layers(model, adapter)
    config = layers[0].molora_config[adapter]
    config.check_expert(name, "remove_expert")
    if len(config.experts) == 1:
        raise ConfigError(f"remove_expert: {name!r} is the last expert of adapter {adapter!r}; delete the adapter instead")
    if name in [*(entry[-1] for entry in config.vocabulary or []), config.vocabulary_default]:
        raise ConfigError(f"remove_expert: the vocabulary sends tokens to {name!r}")
    if config.top_k > len(config.slots) - 1:
        raise ConfigError(f"remove_expert: top_k={config.top_k} needs as many experts to choose from")
    old = config.slots
    config.experts = {n: record for n, record in config.experts.items() if n != name}
    _replan(config, layers, _root(layers, model))
    for layer in layers:
        layer.molora_experts[adapter].remove(name)
        layer.molora_scaling[adapter].pop(name, None)
        if adapter in layer.molora_router:
            _remap(layer.molora_router[adapter], old, config.slots, -math.inf)  # type: ignore[arg-type]


def _root(layers: list[MoLoraLinear], model: nn.Module) -> nn.Module:
    """The module under which the layers are called by their keys: the model PEFT or transformers adapted."""
    wanted = layers[0].key
    for module in model.modules():
        with contextlib.suppress(AttributeError):
            if module.get_submodule(wanted) is layers[0]:
                return module
    raise ConfigError(f"{type(model).__name__} does not hold the whole adapted model")


def _replan(config: MoLoraConfig, layers: list[MoLoraLinear], root: nn.Module) -> None:
    # The same modules stay adapted, also where the last expert left one: so the routers stay where they are.
    former: Plan = plan_of(config)
    experts = {name: unpack(name, record) for name, record in config.experts.items()}
    config.__dict__["_plan"] = make_plan(config, experts, [layer.key for layer in layers], root)
    assert dict(plan_of(config).hosts) == dict(former.hosts)


def _remap(router: Router, old: tuple[str | None, ...], new: tuple[str | None, ...], bias: float) -> None:
    """Give every slot of ``new`` the row it had in ``old``; a slot that had none gets zeros and ``bias``."""
    with torch.no_grad():
        w2, b = router.w2.new_zeros(len(new), router.w2.shape[1]), router.bias.new_full((len(new),), bias)
        for place, slot in enumerate(new):
            if slot in old:
                w2[place], b[place] = router.w2[old.index(slot)], router.bias[old.index(slot)]
    router.w2 = nn.Parameter(w2, requires_grad=router.w2.requires_grad)
    router.bias = nn.Parameter(b, requires_grad=router.bias.requires_grad)


def merge_single(model: Any, expert: str, *, adapter: str = "default") -> Any:
    """Merge one expert into the base weights for all tokens and return the model without any molora layer.

    Args:
        model: a ``PeftModel`` whose adapter is a molora adapter.
        expert: which one.
        adapter: which molora adapter.

    Raises:
        ConfigError: no such expert; nothing is changed.
        UnsupportedError: the base is quantised and ``merge_quantized`` is off.
    """
    layers = _layers(model, adapter)
    layers[0].molora_config[adapter].check_expert(expert, "merge_single")
    if expert is None or not hasattr(model, "base_model") or not hasattr(model.base_model, "unload"):
        raise ConfigError(f"merge_single: needs a PeftModel and the name of an expert, got {type(model).__name__} and {expert!r}")
    for layer in layers:
        TunerLinear.check_merge(layer, adapter, layer.molora_config[adapter])
    for layer in layers:
        layer.merge_expert(adapter, expert)
    return model.base_model.unload()


# -- the router in its own file -------------------------------------------------------------------------------------------


def save_router(model: nn.Module, path: str | Path, *, adapter: str = "default") -> None:
    """Write the router alone into one safetensors file, with the names and hashes of the experts it was trained for."""
    layers = _layers(model, adapter)
    config = layers[0].molora_config[adapter]
    routers = {layer.key: layer.molora_router[adapter] for layer in layers if adapter in layer.molora_router}
    if not routers:
        raise ConfigError(f"save_router: adapter {adapter!r} has router={config.router!r}, which has no parameters")
    tensors = {f"{key}.{part}": p.detach().contiguous() for key, r in routers.items() for part, p in r.named_parameters()}
    facts = {
        "experts": {name: record["sha256"] for name, record in config.experts.items()},
        "slots": config.slots,
        "scope": [config.router_scope, config.router_layer if config.router_scope == "model" else None],
    }
    save_file(tensors, str(path), metadata={"format": "pt", "hfplug": _FORMAT, "molora": json.dumps(facts)})


def load_router(model: nn.Module, path: str | Path, *, adapter: str = "default") -> None:
    """Read a router written by :func:`save_router`; rows go to the experts of their names, whatever the order.

    Raises:
        ConfigError: it was trained for other experts (names or tensors), or for another scope or model; nothing is changed.
    """
    layers = _layers(model, adapter)
    config = layers[0].molora_config[adapter]
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("hfplug") != _FORMAT:
            raise ConfigError(f"load_router: {Path(path).name} is no router file ({metadata.get('hfplug')!r} is not {_FORMAT!r})")
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    facts = json.loads(metadata["molora"])
    own = {name: record["sha256"] for name, record in config.experts.items()}
    if set(facts["experts"]) != set(own):
        raise ConfigError(f"load_router: the router is for the experts {sorted(facts['experts'])}, the adapter has {sorted(own)}")
    if other := sorted(name for name in own if own[name] != facts["experts"][name]):
        raise ConfigError(
            f"load_router: the tensors of {other} are not those the router was trained with: sha256 "
            f"{[facts['experts'][n] for n in other]} there, {[own[n] for n in other]} here"
        )
    scope = [config.router_scope, config.router_layer if config.router_scope == "model" else None]
    if facts["scope"] != scope or set(facts["slots"]) != set(config.slots):
        raise ConfigError(
            f"load_router: the router has scope {facts['scope']} and slots {facts['slots']}, the adapter {scope}, {config.slots}"
        )
    rows = [facts["slots"].index(slot) for slot in config.slots]
    values = {}
    for layer in layers:
        if adapter in layer.molora_router:
            for part, parameter in layer.molora_router[adapter].named_parameters():
                key = f"{layer.key}.{part}"
                value = stored.pop(key, None)
                value = value if value is None or part == "w1" else value[rows]
                if value is None or value.shape != parameter.shape:
                    found = None if value is None else tuple(value.shape)
                    raise ConfigError(f"load_router: {key!r} is {found} in the file and {tuple(parameter.shape)} in the adapter")
                values[key] = (parameter, value)
    if stored:
        raise ConfigError(f"load_router: the file has routers that the adapter does not, first {min(stored)!r}")
    with torch.no_grad():
        for parameter, value in values.values():
            parameter.copy_(value)
