"""Values in two parts: what the value projection of a layer adds to its base, as the running forward makes it.

Nothing in the model is replaced. Hooks on the value projections keep, for as long as a forward runs, what the base layer and
``lora_A`` gave; the output of the projection is what it always was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from hfplug.calls import Call, CallScope, call_scope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import Decoder, Split, decoder_of
from hfplug.ledger import Ledger
from hfplug.loras import LiveLora

SCOPE = "_hfplug_lragent_scope"  # on attention modules, for the attention implementation
_SPLIT = "_hfplug_lragent"  # on the token stack
_USER = "lragent"


class _Tap:
    """A forward hook that keeps an output for the running call, where its cache wants the parts."""

    def __init__(self, scope: CallScope, key: tuple[Any, ...]) -> None:
        self.scope, self.key = scope, key

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        call = self.scope.current
        if call is not None and getattr(call.cache, "takes_parts", False):
            call.memo[self.key] = output.detach()


def _commit(call: Call) -> None:
    if getattr(call.cache, "takes_parts", False):
        call.cache.commit(call)


@dataclass(frozen=True)
class ValueLayer:
    """Where the values of one layer are made.

    Attributes:
        path: name of the projection in the model.
        attention: the attention module.
        projection: the projection; a ``LoraLayer`` where any adapter adapts it.
        split: the parts of its output, one of which is the values.
    """

    path: str
    attention: Any
    projection: Any
    split: Split

    def values_of(self, out: Tensor) -> Tensor:
        """The values ``(..., heads x dim)`` among the outputs ``(..., width)`` of the projection."""
        at = self.split.roles.index("v")
        if self.split.heads:
            shape = (*out.shape[:-1], self.split.heads, len(self.split.roles), self.split.sizes[at] // self.split.heads)
            return out.view(shape)[..., at, :].flatten(-2)
        begin = sum(self.split.sizes[:at])
        return out[..., begin : begin + self.split.sizes[at]]

    def adapts(self, agent: str) -> bool:
        """Whether an adapter adapts the projection."""
        return isinstance(self.projection, LoraLayer) and agent in self.projection.lora_A

    def factors(self, agent: str) -> tuple[Tensor, Tensor, float]:
        """``A`` ``(rank, in)``, the rows of ``B`` ``(heads x dim, rank)`` that make values, and the scaling."""
        layer = self.projection
        B = self.values_of(layer.lora_B[agent].weight.detach().t()).t()
        return layer.lora_A[agent].weight.detach(), B, float(layer.scaling[agent])

    def up(self, agent: str, heads: int, dtype: torch.dtype) -> Tensor:
        """``B`` with the scaling, head by head: ``(heads, rank, dim)``."""
        _, B, scaling = self.factors(agent)
        return (B.t() * scaling).to(dtype).unflatten(1, (heads, -1)).transpose(0, 1)

    def parts(self, call: Call, layer: int, agent: str, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Base values ``(batch, heads, new, dim)`` and ``x A`` ``(batch, 1, new, rank)`` of the running call.

        Args:
            values: what the model gave the cache; must be what the projection made.

        Raises:
            UnsupportedError: the model changes the values on their way, or they were made with several adapters.
        """
        if not isinstance(self.projection, LoraLayer):
            return values, None
        out, base = call.memo.pop((_USER, "out", layer), None), call.memo.pop((_USER, "base", layer), None)
        if out is None or base is None or out.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
            raise UnsupportedError(
                f"lragent: the values of layer {layer} are not what {self.path!r} made (the model changes them on their way to "
                "the cache, or ran the layer by parts); a base and a low-rank part cannot be told apart"
            )
        heads, new = values.shape[1:3]
        # Not a view of the projection's whole output, which the cache would keep alive.
        plain = self.values_of(base).to(values.dtype).unflatten(-1, (heads, -1)).transpose(1, 2)
        low = call.memo.pop((_USER, "low", layer, agent), None)
        others = [key[3] for key in call.memo if key[:3] == (_USER, "low", layer)]
        wrong = low is None if self.adapts(agent) else low is not None
        if others or wrong or (low is not None and tuple(low.shape[:2]) != (values.shape[0], new)):
            raise UnsupportedError(
                f"lragent: layer {layer} ran other adapters than {agent!r} alone; adapter_names= (several in one batch) is not "
                "for a view of one agent"
            )
        return plain, None if low is None else low.to(values.dtype)[:, None]


class ModelSplit:
    """The hooks on one model, shared by all caches made for it; the last one to leave removes every trace.

    Attributes:
        decoder: where the layers stand.
        layers: one entry a layer.
        scope: the calls of the model.
        loras: every LoRA layer of the model.
    """

    def __init__(self, model: Any) -> None:
        self.decoder: Decoder = decoder_of(model)
        self.scope = call_scope(self.decoder.model)
        self.loras = [m for m in self.decoder.model.modules() if isinstance(m, LoraLayer)]
        self.layers: list[ValueLayer] = []
        for index, layer in enumerate(self.decoder.layers):
            path, module, split = next(p for p in self.decoder.projections(index) if "v" in p[2].roles)
            self.layers.append(ValueLayer(path, layer.get_submodule(self.decoder.family.attention), module, split))
        self.ledger = Ledger(_USER)
        self.users = 0

    def join(self) -> Callable[[], None]:
        """Hook the model for one more user; the result ends that, and may be called twice."""
        with self.ledger.transaction():
            for index, layer in enumerate(self.layers):
                self._tap(index, layer)
            if not self.users:
                self.scope.join(_USER, _commit)
                vars(self.decoder.stack)[_SPLIT] = self
        self.users += 1
        left: list[bool] = []

        def leave() -> None:
            if not left:
                left.append(True)
                self.users -= 1
                if not self.users:
                    self.ledger.undo()
                    self.scope.leave(_USER)
                    vars(self.decoder.stack).pop(_SPLIT, None)

        return leave

    def _tap(self, index: int, layer: ValueLayer) -> None:
        if SCOPE not in vars(layer.attention):
            self.ledger.set_attr(layer.attention, SCOPE, (self.scope, index))
        if not isinstance(layer.projection, LoraLayer):
            return
        wanted: dict[tuple[Any, ...], Any] = {
            (_USER, "out", index): layer.projection,
            (_USER, "base", index): layer.projection.get_base_layer(),
        }
        wanted |= {(_USER, "low", index, name): module for name, module in layer.projection.lora_A.items()}
        for key, module in wanted.items():
            if not any(isinstance(h, _Tap) and h.key == key for h in module._forward_hooks.values()):
                self.ledger.hook(module, "forward", _Tap(self.scope, key))


def split_of(model: Any) -> ModelSplit:
    """The one split of a model, made at first use; anew where adapters were added since."""
    decoder = decoder_of(model)
    found: ModelSplit | None = vars(decoder.stack).get(_SPLIT)
    if found is not None and found.decoder.stack is decoder.stack:
        made = {id(m) for m in decoder.model.modules() if isinstance(m, LoraLayer)}
        if made == {id(m) for m in found.loras}:
            return found
        raise UnsupportedError(
            "lragent: adapters were added to further modules while a shared cache of this model is in use; close() the caches "
            "made before"
        )
    return ModelSplit(model)


def until_collected(owner: Any, leave: Callable[[], None]) -> None:
    """Call ``leave`` when ``owner`` is gone."""
    weakref.finalize(owner, leave)


def adapted_layers(model: Any, decoder: Decoder, agent: str) -> dict[int, set[str]]:
    """Which projections (by their roles) of which layers an adapter adapts.

    Raises:
        ConfigError, UnsupportedError: no such adapter, or no plain LoRA; or it adapts something in front of the layers.
    """
    found: dict[int, set[str]] = {}
    roles = {path: set(split.roles) for i in range(len(decoder.layers)) for path, _, split in decoder.projections(i)}
    heads = [name for name, module in decoder.model.named_modules() if module is decoder.model.get_output_embeddings()]
    for path in LiveLora(model, agent).shapes:
        index = decoder.layer_of(path)
        if index is not None:
            found.setdefault(index, set()).update(roles.get(path, {"other"}))
        elif path not in heads:
            raise UnsupportedError(
                f"lragent: adapter {agent!r} adapts {path!r}, outside of the layers: what the layers read would differ from the "
                "first one on, and nothing could be shared"
            )
    return found


def tie_value_a(model: Any, source: str, agents: tuple[str, ...] | list[str]) -> int:
    """Give adapters the ``lora_A`` of ``source`` on every value projection, and freeze it there, before they are trained.

    What mode ``base_lr`` needs (LRAgent, section 3). ``set_adapter`` makes the parameters of an adapter trainable again: call
    this after it.

    Args:
        model: the ``PeftModel``.
        source: the adapter whose ``A`` the others get.
        agents: the others.

    Returns:
        How many projections were tied.

    Raises:
        ConfigError: no such adapter, or ranks or layers that differ; nothing was changed.
    """
    split, pairs = ModelSplit(model), []
    for name in (source, *agents):
        LiveLora(model, name)
    for layer in split.layers:
        for name in agents:
            if layer.adapts(name) != layer.adapts(source):
                raise ConfigError(f"adapters {source!r} and {name!r} do not both adapt {layer.path!r}; nothing was changed")
            if layer.adapts(name):
                A, other = layer.projection.lora_A[source].weight, layer.projection.lora_A[name].weight
                if A.shape != other.shape:
                    raise ConfigError(
                        f"{layer.path!r}: adapter {name!r} has rank {other.shape[0]}, {source!r} {A.shape[0]}; nothing "
                        "was changed"
                    )
                pairs.append((A, other))
    with torch.no_grad():
        for A, other in pairs:
            other.copy_(A)
            other.requires_grad_(False)
    return len(pairs)


__all__ = ["SCOPE", "ModelSplit", "ValueLayer", "adapted_layers", "split_of", "tie_value_a"]
