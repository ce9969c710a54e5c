"""The patches ``retoken`` and ``mort``: their options, where they go into a model, and what they cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from hfplug.calls import call_scope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import Decoder, decoder_of
from hfplug.ledger import Ledger
from hfplug.modeling_patches.retoken.tables import Gate, RoutedSum, Router, TokenTable
from hfplug.modeling_patches.retoken.tokens import TokenModulation, TokenReader
from hfplug.modelpatch import ModelPatch


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class _TokenPatch(ModelPatch):
    """What both have in common."""

    identity: ClassVar[bool] = True
    works_with: ClassVar[frozenset[str]] = frozenset({"quantized"})
    routed: ClassVar[bool] = False

    rank: int = _option(
        0,
        "0: a table of (tokens, hidden) in every layer, as in the paper; > 0: one table of (tokens, rank) shared by all layers, "
        "and a basis of (rank, hidden) in each",
    )
    ids: tuple[int, ...] | None = _option(None, "the token ids that have rows; the others are left alone. None: all of them")
    norm: Literal["l2", "rms"] = _option(
        "l2", "rows have length 1 ('l2', as in the paper) or sqrt(hidden): a smaller scale then acts"
    )
    eps: float = _option(1e-6, "added to the length a row is divided by")
    sparse: bool = _option(False, "gradients of the tables are sparse tensors of the batch's rows, for optimizers that take them")
    offload: bool = _option(False, "tables stay in host memory; only the rows of a batch travel to the accelerator")
    seed: int = _option(0, "of the first values of tables, bases and routers, which do not touch torch's global generator")

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"rank={self.rank!r} must be 0 (full tables) or more")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ConfigError(f"eps={self.eps!r} must be finite and > 0")
        if self.norm not in ("l2", "rms"):
            raise ConfigError(f"norm={self.norm!r} must be 'l2' or 'rms'")
        if self.ids is not None:
            if not self.ids or min(self.ids) < 0:
                raise ConfigError(
                    f"ids must hold at least one id, all >= 0; got {len(self.ids)} from {min(self.ids, default='none')}"
                )
            if len(set(self.ids)) != len(self.ids):
                twice = next(i for n, i in enumerate(self.ids) if i in self.ids[:n])
                raise ConfigError(f"ids names {twice} twice")

    # -- structure -------------------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Put a reader on the token stack, and a modulation with its table into every layer.

        Raises:
            ConfigError: an id that is not in the vocabulary.
            UnsupportedError: an OPT model with quantised weights, whose MLP is no module that could be hooked; layers that run on
                a part of the tokens at a time (turboconn).
        """
        decoder = decoder_of(model)
        stack, scope = decoder.stack, call_scope(decoder.model)
        likes = [_like(decoder, index) for index in range(len(decoder.layers))]
        vocabulary = _vocabulary(decoder)
        size = self._rows(vocabulary)
        name = self.method
        ledger.run(functools.partial(scope.join, name, whole=True), functools.partial(_leave, scope, name))
        codes = self._table(size, self.rank, 1.0, 0, likes[0]) if self.rank else None
        reader = TokenReader(name, vocabulary, self.ids, codes, scope, likes[0])
        ledger.add_module(stack, name, reader)
        if decoder.base is not stack:
            ledger.hook(decoder.base, "forward_pre", reader.enter, with_kwargs=True)
            ledger.hook(decoder.base, "forward", reader.leave, always_call=True)
        ledger.hook(stack, "forward_pre", reader.begin, with_kwargs=True)
        std = float(getattr(decoder.config, "initializer_range", getattr(decoder.config, "init_std", 0.02)))
        for index, layer in enumerate(decoder.layers):
            table = None if self.rank else self._table(self.tables_of * size, likes[index].shape[0], std, 2 * index, likes[index])
            if table is not None:
                reader.tables.append(table)
            modulation, router = self._parts(decoder, index, likes[index], table)
            path, flat = _where(decoder)
            target: Any = layer.get_submodule(path)
            if flat:
                self._check_bare(decoder, index, path, target, ledger)
            holder = TokenModulation(reader, modulation, router, getattr(self, "top_k", 0), flat)
            ledger.add_module(layer, name, holder)
            if router is not None:
                # Not on the layer itself, whose hooks run outside its checkpoint: the router belongs to what is recomputed.
                ledger.hook(layer.get_submodule(_first(decoder)), "forward_pre", holder.route, with_kwargs=True)
            ledger.hook(target, "forward", holder.modulate)

    def _check_bare(self, decoder: Decoder, index: int, path: str, target: Any, ledger: Ledger) -> None:
        # A loader that quantises would replace this module, with its hook, after the patch has been rebuilt.
        if getattr(decoder.model.config, "quantization_config", None) is not None:
            raise UnsupportedError(f"{self.method}: {decoder.layer_path(index)}.{path} is quantised, and it is what is modulated")
        if not self.routed:
            ledger.set_attr(target, "merge_refused", "retoken scales the output of this module by token, after its weight")

    def _parts(self, decoder: Decoder, index: int, like: Tensor, table: TokenTable | None) -> tuple[nn.Module, Router | None]:
        raise NotImplementedError

    def _table(self, rows: int, width: int, std: float, place: int, like: Tensor) -> TokenTable:
        return TokenTable(rows, width, std, self._seed(place), like, self.sparse, self.offload)

    def _seed(self, place: int) -> int:
        return self.seed * 1_000_003 + place + 1

    def _rows(self, vocabulary: int) -> int:
        if self.ids is None:
            return vocabulary
        if max(self.ids) >= vocabulary:
            raise ConfigError(f"{self.method}: ids names {max(self.ids)}; the vocabulary ends at {vocabulary - 1}")
        return len(self.ids)

    @property
    def tables_of(self) -> int:
        """Number of tables in a layer."""
        return 1

    # -- cost --------------------------------------------------------------------------------------------------------------------

    def notes(self, decoder: Decoder) -> Sequence[str]:
        """Parameters and cost as formulas and figures."""
        like = _like(decoder, 0)
        d, layers, e, k = int(like.shape[0]), len(decoder.layers), self.tables_of, self.rank
        rows = self._rows(_vocabulary(decoder))
        tables = f"{'experts ' if self.routed else ''}{'rank' if k else 'rows'} hidden"
        each = f"{tables} + hidden{' + hidden experts' if self.routed else ''}"
        count = (rows * k if k else 0) + layers * (e * (k or rows) * d + d + (d * e if self.routed else 0))
        formula = f"{'rows rank + ' if k else ''}layers ({each})"
        read = self._read(d)
        out = [
            f"parameters: {formula} = {count:,}, with {rows:,} rows, {layers} layers, hidden {d}"
            + (f", {e} experts" if self.routed else "") + (f", rank {k}" if k else ""),
            f"per token and layer: {self._flops(d):,} floating point operations, {read:,} values of tables read",
        ]  # fmt: skip
        if self.offload:
            travels = like.element_size() * (k or read * layers)
            out.append(f"host to accelerator: {travels:,} bytes per token and forward")
        return out

    def _read(self, d: int) -> int:
        """Values read from tables, per token and layer (of shared codes: once for all layers, counted for each)."""
        return self.rank or d

    def _flops(self, d: int) -> int:
        """Of the formulas in tables.py, per token and layer; a norm is counted as 3 per value."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReToken(_TokenPatch):
    """``h + dm ⊙ p`` with ``p = 1 + s ⊙ Norm(E[x])``: each MLP's output is scaled by a vector of the token.

    Source: JTok of arXiv 2602.00800, as far as the notes on it say (our reading); ``rank > 0`` is our own.
    """

    method: ClassVar[str] = "retoken"

    def _parts(self, decoder: Decoder, index: int, like: Tensor, table: TokenTable | None) -> tuple[nn.Module, Router | None]:
        return Gate(like, table, 1, self.rank, self.norm, self.eps, self._seed(2 * index + 1)), None

    def _flops(self, d: int) -> int:
        return 6 * d + 2 * self.rank * d


@dataclass(frozen=True)
class MoRT(_TokenPatch):
    """``h + dm + (2 N)^-1/2 · s ⊙ Norm(sum_i w_i E_i[x])``: a vector of the token is added, mixed by a router on the context.

    The router reads what the layer is given, before attention; the best ``top_k`` of ``experts`` tables have weights
    ``sigmoid(g_i)`` over their sum. Source: JTok-M of arXiv 2602.00800, as far as the notes on it say (our reading). To
    train with the balance loss: ``hfplug.losses.add(trainer, RouterBalance(RouterBalanceConfig()))``.
    """

    method: ClassVar[str] = "mort"
    routed: ClassVar[bool] = True

    experts: int = _option(5, "number of tables (with rank: of bases) in each layer; the paper's main runs use 5")
    top_k: int = _option(2, "how many of them a token uses; with 1 the router learns from the balance loss alone")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts < 1:
            raise ConfigError(f"experts={self.experts!r} must be 1 or more")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top_k={self.top_k!r} must be from 1 to experts={self.experts}")

    @property
    def tables_of(self) -> int:
        """Number of tables in a layer."""
        return self.experts

    def _parts(self, decoder: Decoder, index: int, like: Tensor, table: TokenTable | None) -> tuple[nn.Module, Router | None]:
        seed = self._seed(2 * index + 1)
        modulation = RoutedSum(
            like, table, self.experts, self.rank, self.norm, self.eps, seed, top_k=self.top_k, depth=len(decoder.layers)
        )
        return modulation, Router(like, self.experts, seed + 500_000)

    def _read(self, d: int) -> int:
        return self.rank or self.top_k * d

    def _flops(self, d: int) -> int:
        mix = self.experts * self.rank * (1 + 2 * d) if self.rank else 2 * self.top_k * d
        return 3 * d + 2 * d * self.experts + mix + 6 * d


def _like(decoder: Decoder, index: int) -> Tensor:
    """A parameter of a layer whose width, device and dtype are those of hidden states, also where weights are quantised."""
    weight: Any = decoder.layers[index].get_submodule(decoder.family.norms[0]).weight
    found: Tensor = weight
    return found


def _vocabulary(decoder: Decoder) -> int:
    return int(decoder.stack.get_input_embeddings().num_embeddings)


def _first(decoder: Decoder) -> str:
    """The first module of a layer, which is given what the layer is given."""
    before = getattr(decoder.config, "do_layer_norm_before", True)  # OPT's smallest models have their norms behind
    return decoder.family.norms[0] if before else decoder.family.attention


def _where(decoder: Decoder) -> tuple[str, bool]:
    """The module of a layer whose output is added to the residual, and whether it works on flattened tokens."""
    family = decoder.family
    after = [name for name in family.norms if name.startswith("post_feedforward")]
    if after:
        return after[0], False
    if family.mlp:
        return family.mlp, False
    return next(path for path, role in family.projections.items() if role == "down"), True


def _leave(scope: Any, name: str, joined: None) -> None:
    scope.leave(name)


__all__ = ["MoRT", "ReToken"]
