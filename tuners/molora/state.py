"""What the MoLoRA layers of a model share: the calls they follow, decisions made above them, and given ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hfplug.calls import Call, CallScope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.tuners.molora.config import MoLoraConfig
from hfplug.tuners.molora.plan import plan_of
from hfplug.tuners.molora.router import Decision, choose

LOGITS = ("molora", "logits")  # in Call.memo: what RouterLoss reads


@dataclass(frozen=True)
class Forced:
    """All tokens to one expert; ``None``: the base model."""

    expert: str | None


@dataclass(frozen=True)
class Given:
    """A decision from outside, in place of the router's.

    Attributes:
        forced: set: all tokens to that expert.
        ids: adapter -> ``(batch, tokens)`` int64 into ``(None, *names)``; the last column stands for all later tokens.
    """

    forced: Forced | None = None
    ids: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Logits:
    """What a router computed in a training forward."""

    adapter: str
    config: MoLoraConfig
    logits: Tensor
    index: Tensor


class ModelState:
    """One per model, shared by its MoLoRA layers."""

    def __init__(self, scope: CallScope) -> None:
        self.scope = scope
        self.layers: list[Any] = []
        self.given: list[Given] = []
        self.outer_ids: Tensor | None = None
        self._handles: list[Any] = []
        self._hosts: dict[int, list[tuple[Any, str]]] | None = None
        scope.join("molora")

    def follow(self, model: nn.Module, decoder_layers: list[nn.Module]) -> None:
        """Hook what decisions are made from: the decoder layers, and the modules around the stack that see token ids."""
        if self._handles:
            return
        for index, layer in enumerate(decoder_layers):
            # Hooks of a decoder layer run outside its gradient checkpoint: once per forward, with the graph of its input.
            self._handles.append(layer.register_forward_pre_hook(_EnterLayer(self, index), with_kwargs=True))
        stack = next((name for name, module in model.named_modules() if module is self.scope.stack), "")
        parts = stack.split(".")[:-1] if stack else []
        for depth in range(len(parts) + 1 if stack else 0):
            around = model.get_submodule(".".join(parts[:depth]))
            if isinstance(around, (nn.ModuleList, nn.ModuleDict)):
                continue
            self._handles.append(around.register_forward_pre_hook(_EnterOuter(self), with_kwargs=True))
            self._handles.append(around.register_forward_hook(_LeaveOuter(self), always_call=True))

    def close(self) -> None:
        """The model is unloaded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.scope.leave("molora")
        self.layers.clear()
        self.changed()

    # -- decisions ------------------------------------------------------------------------------------------------------

    def enter_layer(self, index: int, hidden: Tensor) -> None:
        """Decide for the modules of a decoder layer, from its input."""
        call = self.scope.current
        if call is None or self.given:
            return
        for layer, name in self._routers(index):
            if name in layer.molora_router and name in layer.active_adapters and not layer.disable_adapters:
                place = index if layer.molora_config[name].router_scope == "layer" else "model"
                call.memo["molora", name, place] = self._routed(layer, name, hidden, call)

    def _routers(self, index: int) -> list[tuple[Any, str]]:
        """The modules and adapters whose router reads the input of a decoder layer; looked up once, it is asked per token."""
        if self._hosts is None:
            self._hosts = {}
            for layer in self.layers:
                for name, config in layer.molora_config.items():
                    if name in layer.molora_router and config.router_scope != "module":
                        self._hosts.setdefault(plan_of(config).hosts[layer.key], []).append((layer, name))
        return self._hosts.get(index, [])

    def changed(self) -> None:
        """An adapter was added."""
        self._hosts = None

    def _routed(self, layer: Any, name: str, h: Tensor, call: Call | None) -> Decision:
        config: MoLoraConfig = layer.molora_config[name]
        router = layer.molora_router[name]
        logits = router(h.to(router.w1.device))
        soft = config.routing == "soft"
        decision = choose(
            logits, config.slots, top_k=config.top_k, soft=soft, temperature=config.temperature, gradient=config.router_gradient
        )
        if call is not None and call.grad and not self.scope.recompute:
            call.memo.setdefault(LOGITS, []).append(Logits(name, config, logits, decision.index))
        return decision

    def decide(self, layer: Any, name: str, x: Tensor) -> Decision | Forced | None:
        """Where the tokens ``x`` of a module go in adapter ``name``; ``None``: all run the base model.

        Raises:
            UnsupportedError: the router's gradient cannot flow, or the tokens of the call are not known here.
        """
        call, config = self.scope.current, layer.molora_config[name]
        if self.given:
            return self._from_given(self.given[-1], name, config, x, call)
        if config.router == "none":
            raise UnsupportedError(
                "molora: router='none' decides nothing; call the model inside `with hfplug.tuners.routing(model, "
                "adapter_ids=...)` or `routing(model, expert=...)`"
            )
        if config.router == "vocabulary":
            return self._from_vocabulary(name, config, x, call)
        if config.router_scope == "module":
            return self._routed(layer, name, x, call)
        index = plan_of(config).layers[layer.key]
        decision = None if call is None else call.memo.get(("molora", name, index if config.router_scope == "layer" else "model"))
        if decision is None:
            if config.router_scope == "model" and index < config.router_layer:
                return None
            raise UnsupportedError(
                f"molora: {layer.key!r} runs outside a forward of {type(self.scope.stack).__name__}, so its tokens have "
                "no decision; call the whole model, or use router_scope='module'"
            )
        if decision.learns is not None and not torch.is_grad_enabled():
            raise UnsupportedError(
                "molora: reentrant gradient checkpointing hides the gradient of the router; set "
                'gradient_checkpointing_kwargs={"use_reentrant": False}, or use router_scope="module"'
            )
        return decision

    def _from_given(self, given: Given, name: str, config: MoLoraConfig, x: Tensor, call: Call | None) -> Decision | Forced:
        if given.forced is not None:
            return given.forced
        key = ("molora", name, "given")
        if call is not None and key in call.memo:
            return call.memo[key]
        batch, length, past = x.shape[0], x.shape[1], 0
        if call is not None and call.length:
            batch, length, past = call.batch, call.length, call.past
        ids = given.ids[name]
        if batch % ids.shape[0]:
            raise ConfigError(f"adapter_ids is for {ids.shape[0]} rows, the model was called with {batch}")
        ids = ids.repeat_interleave(batch // ids.shape[0], 0)  # the beams of generate() stand next to each other
        columns = torch.arange(past, past + length).clamp(max=ids.shape[1] - 1)
        decision = Decision((None, *config.names), ids[:, columns].unsqueeze(-1).to(x.device))
        if call is not None:
            call.memo[key] = decision
        return decision

    def _from_vocabulary(self, name: str, config: MoLoraConfig, x: Tensor, call: Call | None) -> Decision:
        key = ("molora", name, "vocabulary")
        if call is not None and key in call.memo:
            return call.memo[key]
        ids = None if call is None else call.input_ids if call.input_ids is not None else self.outer_ids
        if ids is None or call is None or tuple(ids.shape) != (call.batch, call.length):
            got = "no token ids" if ids is None else f"token ids of shape {tuple(ids.shape)}"
            raise UnsupportedError(
                f"molora: the vocabulary router was given {got} (embeddings only?); call the model inside `with "
                "hfplug.tuners.routing(model, adapter_ids=...)`"
            )
        decision = Decision((None, *config.names), table_lookup(config, ids).unsqueeze(-1).to(x.device))
        call.memo[key] = decision
        return decision


def table_lookup(config: MoLoraConfig, ids: Tensor) -> Tensor:
    """The slot of every token id by the ranges and lists of ``config.vocabulary``; later entries win."""
    slots = {name: slot for slot, name in enumerate((None, *config.names))}
    found = torch.full_like(ids, slots[config.vocabulary_default])
    for entry in config.vocabulary or []:
        if len(entry) == 3:
            hit = (ids >= entry[0]) & (ids < entry[1])
        else:
            hit = torch.isin(ids, torch.as_tensor(entry[0], device=ids.device, dtype=ids.dtype))
        found = found.masked_fill(hit, slots[entry[-1]])
    return found


class _EnterLayer:
    def __init__(self, state: ModelState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            self.state.enter_layer(self.index, hidden)


class _EnterOuter:
    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2:
            self.state.outer_ids = ids


class _LeaveOuter(_EnterOuter):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.state.outer_ids = None
