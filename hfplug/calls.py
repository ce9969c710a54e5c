"""Which call of the model is running: its padding mask, positions and cache, for code deep inside that never sees them.

A ``Linear`` deep in a model does not know which tokens are padding, where a packed document starts, which cache the call
uses, or whether it runs for the first time or is being recomputed by gradient checkpointing. ``call_scope(model)`` knows:

* hooks on the token stack (the decoder, or the encoder of an encoder-only model) bind the call's arguments to a
  :class:`Call` for as long as the forward is on the stack;
* each layer's ``_gradient_checkpointing_func`` is wrapped so that the recomputation in backward sees the *same* ``Call``
  again, with ``recompute`` true, even when several forwards ran before one backward (DPO, GRPO).

Limits: activation checkpointing that does not go through transformers' ``GradientCheckpointingLayer`` recomputes under the
last call of the thread; with several forwards before one backward that is the wrong one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hfplug.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

_ATTRIBUTE = "_hfplug_calls"


def parameter_names(module: nn.Module) -> list[str]:
    """Names of the arguments that the forward of a module's class takes."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def named_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The arguments of a forward by name.

    Args:
        names: :func:`parameter_names` of the module, where they are at hand.
    """
    if not args:
        return dict(kwargs)
    return {**dict(zip(parameter_names(module) if names is None else names, args, strict=False)), **kwargs}


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The KV cache among the arguments of a forward, under its name or its older one."""
    cache = arguments.get("cache")
    return cache if cache is not None else arguments.get("past_key_values")


class Call:
    """One forward of the token stack.

    Attributes:
        input_ids: ``(batch, tokens)`` int as the stack was given them; ``None`` when it was given embeddings.
        attention_mask: ``(batch, tokens)`` bool, true for real tokens, of *this* chunk; ``None`` when all are real.
        position_ids: ``(batch or 1, tokens)`` int, or ``None`` when the caller gave none.
        cache: the cache object the call was given, or the one it returned once it has ended.
        past: number of tokens the cache held when the call began.
        batch, length: shape of the chunk.
        training: whether the stack was in training mode.
        grad: whether gradients were recorded when the call began (inside a reentrant checkpoint they are not).
        memo: scratch space of the methods, living as long as the call (and, under checkpointing, its recomputation).
    """

    __slots__ = ("attention_mask", "batch", "cache", "grad", "input_ids", "length", "memo", "past", "position_ids", "training")

    def __init__(self, arguments: dict[str, Any], training: bool) -> None:
        self.input_ids: torch.Tensor | None = arguments.get("input_ids")
        tokens = self.input_ids if self.input_ids is not None else arguments.get("inputs_embeds")
        shape: tuple[int, ...] = tuple(tokens.shape) if tokens is not None and tokens.dim() > 1 else (0, 0)
        self.batch, self.length = shape[:2]
        self.cache: Any = cache_of(arguments)
        length_of_cache = getattr(self.cache, "get_seq_length", None)
        self.past = int(length_of_cache()) if length_of_cache is not None else 0
        self.training = training
        self.grad = torch.is_grad_enabled()
        self.memo: dict[Any, Any] = {}
        self.attention_mask = self._mask(arguments.get("attention_mask"))
        self.position_ids = self._positions(arguments.get("position_ids"))

    def _mask(self, mask: Any) -> torch.Tensor | None:
        if isinstance(mask, dict):  # prepared masks per layer type; every one of them knows the padding
            mask = next((m for m in mask.values() if m is not None), None)
        if not hasattr(mask, "dim"):
            return None
        if mask.dim() == 4:  # prepared (batch, 1, queries, keys): a real token attends to itself, padding to nothing
            rows = min(self.length, mask.shape[2])
            if mask.shape[3] < self.past + rows:
                return None
            chunk = mask[:, 0, :, self.past : self.past + rows].diagonal(dim1=1, dim2=2)
            chunk = chunk if not chunk.is_floating_point() else chunk >= 0  # additive masks hold 0 where attention is allowed
            chunk = chunk.expand(self.batch, -1)
        elif mask.dim() == 2 and mask.shape[1] >= self.length:
            chunk = mask[:, mask.shape[1] - self.length :].bool()
        else:
            return None
        return None if bool(chunk.all()) else chunk

    def _positions(self, positions: Any) -> torch.Tensor | None:
        if not hasattr(positions, "dim") or positions.dim() not in (2, 3):
            return None
        if positions.dim() == 3:  # (4, batch, tokens): text positions first; (3, batch, tokens) has no text row
            if positions.shape[0] != 4:
                return None
            positions = positions[0]
        return positions if positions.shape[1] == self.length else None

    @property
    def restarts(self) -> torch.Tensor | None:
        """``(batch or 1, tokens)`` bool, true where a packed document starts inside the chunk; ``None`` when none does."""
        if "restarts" not in self.memo:
            found = None
            if self.position_ids is not None and self.length > 1:
                drop = self.position_ids[:, 1:] <= self.position_ids[:, :-1]
                if self.attention_mask is not None:  # positions of padding tokens mean nothing
                    drop = drop & self.attention_mask[:, 1:] & self.attention_mask[:, :-1]
                if bool(drop.any()):
                    found = drop.new_zeros((drop.shape[0], self.length))
                    found[:, 1:] = drop
            self.memo["restarts"] = found
        restarts: torch.Tensor | None = self.memo["restarts"]
        return restarts


class _Frame(threading.local):
    """What runs in this thread: autograd recomputes in a thread of its own on a GPU, serving uses several."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.recompute = False
        self.outer: list[tuple[Call | None, bool]] = []  # what the forwards still running had, the innermost last

    @property
    def depth(self) -> int:
        return len(self.outer)


class CallScope:
    """The calls of one model. Get it with :func:`call_scope`.

    Attributes:
        stack: the module whose forward is one call.
    """

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        self._frame = _Frame()
        self._users: dict[str, Callable[[Call], None] | None] = {}
        self._whole: set[str] = set()  # users whose code in the layers needs all tokens of a call at once
        self._cutters: set[str] = set()
        self._handles: list[Any] = []
        self._names: list[str] | None = None  # of the arguments of the stack

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frame": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _frame=_Frame())

    @property
    def current(self) -> Call | None:
        """The call running in this thread or being recomputed; after a training forward, that last call."""
        return self._frame.call

    @property
    def recompute(self) -> bool:
        """Whether the code runs in the recomputation of gradient checkpointing, so statistics must not be counted again."""
        return self._frame.recompute or self._frame.depth == 0

    def join(self, user: str, on_end: Callable[[Call], None] | None = None, *, whole: bool = False) -> None:
        """Start following calls for ``user``; ``on_end(call)`` runs when the forward returned without an error.

        Args:
            whole: the user's code in the layers needs all tokens of a call at once.

        Raises:
            UnsupportedError: it does, and somebody runs the layers on a part of the tokens at a time (:meth:`cut`).
        """
        if whole and self._cutters:
            raise UnsupportedError(_parts(min(self._cutters), user))
        if whole:
            self._whole.add(user)
        if not self._handles:
            self._handles = [
                self.stack.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                self.stack.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            ]
        self._users[user] = on_end

    def cut(self, user: str) -> None:
        """Say that ``user`` runs the layers on parts of a call's tokens; until it leaves.

        Raises:
            UnsupportedError: somebody in the layers needs all of them at once.
        """
        if self._whole:
            raise UnsupportedError(_parts(user, min(self._whole)))
        self._cutters.add(user)

    def leave(self, user: str) -> None:
        """Stop following for ``user``; the last one to leave removes every trace from the model."""
        self._users.pop(user, None)
        self._whole.discard(user)
        self._cutters.discard(user)
        if self._users:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self.stack.modules():
            func = vars(layer).get("_gradient_checkpointing_func")
            if isinstance(func, _CheckpointInCall):
                layer._gradient_checkpointing_func = func.func  # type: ignore[assignment]
        if not self._cutters:
            vars(self.stack).pop(_ATTRIBUTE, None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = self._frame
        frame.outer.append((frame.call, frame.recompute))
        frame.recompute = False
        if self._names is None:
            self._names = parameter_names(module)
        frame.call = Call(named_arguments(module, args, kwargs, self._names), module.training)
        if module.training:
            self._follow_checkpoints()

    def _follow_checkpoints(self) -> None:
        for layer in self.stack.modules():
            func = vars(layer).get("_gradient_checkpointing_func")
            if func is not None and not isinstance(func, _CheckpointInCall):
                layer._gradient_checkpointing_func = _CheckpointInCall(func, self)  # type: ignore[assignment]

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._frame
        call = frame.call
        outer, frame.recompute = frame.outer.pop() if frame.outer else (None, False)
        if call is None or output is None:  # the forward raised
            frame.call = outer if frame.outer else None
            return
        if call.cache is None:
            call.cache = getattr(output, "cache", None)
        for on_end in list(self._users.values()):
            if on_end is not None:
                on_end(call)
        if frame.outer:  # a call from inside a call, by a hook
            frame.call = outer
        elif not call.training:  # nothing will be recomputed, and a remembered call would pin its KV cache in memory
            frame.call = None


def _parts(cutter: str, other: str) -> str:
    return (
        f"{other} and {cutter} do not go on one model: {cutter} runs the layers on a part of the tokens at a time, and {other} "
        "needs all tokens of a forward at once"
    )


class _CheckpointInCall:
    """A layer's checkpoint function that makes the recomputation run inside the call that recorded it."""

    def __init__(self, func: Callable[..., Any], scope: CallScope) -> None:
        self.func, self.scope = func, scope

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return self.func(_RunInCall(run, self.scope, self.scope.current), *args)


class _RunInCall:
    def __init__(self, run: Callable[..., Any], scope: CallScope, call: Call | None) -> None:
        self.run, self.scope, self.call = run, scope, call
        self.seen = False

    def __call__(self, *args: Any) -> Any:
        frame = self.scope._frame
        former = frame.call, frame.recompute
        frame.call, frame.recompute, self.seen = self.call, self.seen, True
        try:
            return self.run(*args)
        finally:
            frame.call, frame.recompute = former


def token_stack(model: nn.Module) -> nn.Module:
    """The module whose forward takes the tokens, mask, positions and cache: the decoder, or the base model.

    A plain ``nn.Module`` is its own stack.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_decoder"):
        return model
    whole: Any = model
    found: nn.Module | None = None if getattr(whole.config, "is_encoder_decoder", False) else whole.get_decoder()
    base: nn.Module = getattr(model, "base_model", model)
    return base if found is None else found


def call_scope(model: nn.Module) -> CallScope:
    """The one :class:`CallScope` of a model, created at first use and kept on its token stack."""
    stack = token_stack(model)
    scope = vars(stack).get(_ATTRIBUTE)
    if scope is None:
        scope = vars(stack)[_ATTRIBUTE] = CallScope(stack)
    return scope
