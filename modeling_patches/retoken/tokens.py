"""Which token each position of the running forward holds, for layers that never see ids; and the hooks that use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfplug.calls import Call, CallScope, named_arguments
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.modeling_patches.retoken.tables import Router, TokenTable
from hfplug.modelpatch import PatchModule

BALANCE = "mort balance"  # in call.memo: (logits, top_k) of every router of the forward, in training


@dataclass
class Tokens:
    """The tokens of one forward.

    Attributes:
        rows: ``(batch, tokens)`` int64, the row of each token; 0 where it has none.
        known: ``(batch, tokens)`` bool, whether it has one; ``None``: all have.
        codes: ``(batch, tokens, rank)`` of the table that all layers share, looked up once; ``None`` without one.
        hidden: whether the forward runs inside reentrant checkpoints, which cut its graph into pieces. A lookup that they
            share would be backpropagated through once for each piece, so each then looks up its own when it is recomputed.
    """

    rows: Tensor
    known: Tensor | None
    codes: Tensor | None
    hidden: bool = False


class TokenReader(PatchModule):
    """On the token stack: finds the ids of each call, and holds the table that layers share.

    Args:
        method: name of the patch.
        vocabulary: number of embeddings.
        ids: the token ids that have rows, in the order of the rows; ``None``: all.
        codes: the shared table, or ``None``.
        scope: the calls of the model.
        embeddings: the input embeddings.
    """

    of_id: Tensor

    def __init__(
        self, method: str, vocabulary: int, ids: tuple[int, ...] | None, codes: TokenTable | None, scope: CallScope, like: Tensor
    ) -> None:
        super().__init__()
        self.method, self.vocabulary, self.ids = method, vocabulary, ids
        self.codes = codes
        self.tables = [] if codes is None else [codes]  # a plain list: those of the layers are children of the layers
        self.scope = scope
        self.given: list[Tensor] = []  # by token_ids()
        self.outer: list[Tensor | None] = []  # by the module around the token stack
        # Not saved: it is made of an option, which is.
        of_id = None if ids is None else torch.empty(vocabulary, dtype=torch.int64, device=like.device)
        self.register_buffer("of_id", of_id, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The row of every id; -1 where it has none."""
        if self.ids is not None and not self.of_id.is_meta:
            rows = torch.full((self.vocabulary,), -1, dtype=torch.int64)
            rows[torch.tensor(self.ids)] = torch.arange(len(self.ids))
            self.of_id.copy_(rows)

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def enter(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module that turns ids into embeddings itself (vision-language models)."""
        ids = named_arguments(base, args, kwargs).get("input_ids")
        self.outer.append(ids if ids is not None else (self.outer[-1] if self.outer else None))

    def leave(self, base: nn.Module, args: Any, output: Any) -> None:
        """After it, also when it failed."""
        if self.outer:
            self.outer.pop()

    def begin(self, stack: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the token stack."""
        call = self.scope.current
        assert call is not None
        whole: Any = stack
        embeddings = whole.get_input_embeddings()
        if getattr(embeddings, "num_embeddings", self.vocabulary) != self.vocabulary:
            raise UnsupportedError(
                f"{self.method}: the model has {embeddings.num_embeddings} embeddings, but its tables were made for "
                f"{self.vocabulary}; resize the embeddings first, then apply the patch"
            )
        for table in self.tables:
            check_place(self.method, table)
        rows, known = self._rows(self._ids(call))
        call.memo[self.method] = Tokens(rows, known, None if self.codes is None else self.codes(rows, known))

    def _ids(self, call: Call) -> Tensor:
        """``(batch, tokens)`` of the call; -1 where there is no token."""
        ids = call.input_ids
        if ids is None and self.outer:
            ids = self.outer[-1]
        # Not in the steps of generate() after a prompt that was named: the model is given their ids.
        named = bool(self.given) and (ids is None or not call.past)
        if named:
            ids = self.given[-1]
        if ids is None:
            raise UnsupportedError(
                f"{self.method}: the model was given inputs_embeds without input_ids; name the tokens around the call: "
                "with hfplug.modeling_patches.token_ids(model, ids): ..."
            )
        virtual = call.length - ids.shape[1]
        if ids.shape[0] != call.batch or virtual < 0 or (virtual and not named):
            raise UnsupportedError(
                f"{self.method}: token ids are {tuple(ids.shape)}, but the model was given {call.batch} x {call.length} tokens; "
                "name the ids around the call: with hfplug.modeling_patches.token_ids(model, ids): ..."
            )
        return nn.functional.pad(ids, (virtual, 0), value=-1) if virtual else ids

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.ids is None:
            return (ids.clamp(min=0), ids >= 0) if self.given else (ids, None)
        rows = self.of_id[ids.clamp(min=0).to(self.of_id.device)].to(ids.device)
        known = (rows >= 0) & (ids >= 0)
        return rows.clamp(min=0), known

    def tokens(self) -> tuple[Call, Tokens]:
        """Of the call that runs or is being recomputed."""
        call = self.scope.current
        found = None if call is None else call.memo.get(self.method)
        if call is None or found is None:
            raise UnsupportedError(f"{self.method}: a layer was called outside the model's forward, which alone knows the tokens")
        return call, found

    def codes_of(self, call: Call, tokens: Tokens) -> Tensor | None:
        """The shared codes, as this layer may use them."""
        if tokens.codes is None or self.codes is None or not call.grad:
            return tokens.codes
        if not torch.is_grad_enabled():
            tokens.hidden = True
        elif tokens.hidden:
            return self.codes(tokens.rows, tokens.known)
        return tokens.codes


class TokenModulation(PatchModule):
    """In a decoder layer: the hooks that change what its MLP adds to the residual.

    The parameters are in children that are called by name, so that PEFT's ``modules_to_save`` may put its copies there.

    Args:
        reader: the stack's reader.
        modulation: a :class:`~hfplug.modeling_patches.retoken.tables.Gate` or ``RoutedSum``.
        router: MoRT's.
        flat: whether the hooked module works on ``(batch * tokens, hidden)``.
    """

    def __init__(self, reader: TokenReader, modulation: nn.Module, router: Router | None, top_k: int, flat: bool) -> None:
        super().__init__()
        self._reader = (reader,)  # in a tuple: it is the stack's child, not this layer's
        self.modulation, self.router = modulation, router
        self.top_k, self.flat = top_k, flat

    def reset_parameters(self) -> None:
        """Nothing of its own."""

    def route(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first module of the layer, which is given what the layer is given."""
        assert self.router is not None
        call, _ = self._reader[0].tokens()
        logits = self.router(args[0] if args else kwargs["hidden_states"])
        call.memo[id(self)] = logits
        if call.training and not self._reader[0].scope.recompute:
            call.memo.setdefault(BALANCE, []).append((logits, self.top_k))

    def modulate(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the module whose output is added to the residual."""
        reader = self._reader[0]
        call, tokens = reader.tokens()
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        shape = tokens.rows.shape
        wanted = (*((shape.numel(),) if self.flat else shape), hidden.shape[-1])
        if hidden.shape != wanted:
            raise UnsupportedError(
                f"{reader.method}: {type(module).__name__} returned {tuple(hidden.shape)} for tokens of {tuple(shape)}"
            )
        codes = reader.codes_of(call, tokens)
        rows, known, codes = (t if t is None else t.to(hidden.device) for t in (tokens.rows, tokens.known, codes))
        assert rows is not None
        if self.router is None:
            changed = hidden * self.modulation(rows, known, codes).view(hidden.shape)
        else:
            logits = call.memo.pop(id(self)).to(hidden.device)
            changed = hidden + self.modulation(rows, known, codes, logits).view(hidden.shape)
        changed = changed.to(hidden.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


def check_place(method: str, table: TokenTable) -> None:
    """Refuse a table that should be in host memory and is not.

    Raises:
        UnsupportedError: it was loaded onto an accelerator.
    """
    if table.offload and table.weight.device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            f"{method}: offload=True keeps tables in host memory, but one was loaded onto {table.weight.device}; load without "
            'device_map, then move the model: model.to("cuda") leaves the tables where they are'
        )


@contextlib.contextmanager
def token_ids(model: nn.Module, ids: Tensor) -> Iterator[None]:
    """Name the tokens of the calls inside: for a model that is given embeddings, or soft prompts before its tokens.

    Args:
        model: a model with ``retoken`` or ``mort``.
        ids: ``(batch, tokens)`` int; -1: no token here. With fewer than the model is given, the first positions have none.
            Calls that go on from a cache and are given ids, such as the steps of ``generate`` after the prompt, use those.

    Raises:
        ConfigError: ``ids`` are no ids of this vocabulary, or the model has neither patch.
    """
    readers = [module for module in model.modules() if isinstance(module, TokenReader)]
    if not readers:
        raise ConfigError(f"model={type(model).__name__} has neither retoken nor mort; hfplug.apply(model, 'retoken') first")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        told = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ConfigError(f"ids={told} must be integers of (batch, tokens)")
    size = min(reader.vocabulary for reader in readers)
    if ids.numel() and (int(ids.max()) >= size or int(ids.min()) < -1):
        raise ConfigError(f"ids go from {int(ids.min())} to {int(ids.max())}; allowed: -1 (no token) to {size - 1}")
    for reader in readers:
        reader.given.append(ids)
    try:
        yield
    finally:
        for reader in readers:
            reader.given.pop()


__all__ = ["BALANCE", "TokenModulation", "TokenReader", "Tokens", "check_place", "token_ids"]
