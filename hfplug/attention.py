"""One call of an attention layer as hfplug hands it to a method, and exact attention of the same call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

logger = logging.getLogger(__name__)

HANDLES = (
    "s_aux", "softcap", "sliding_window", "position_bias", "dense_mask", "dropout", "bidirectional", "output_attentions",
)  # fmt: skip
"""What a method may say in ``handles`` that it takes into account by itself; anything else it is never given."""


class AttentionMethod(Protocol):
    """What the target of a ``Kind.ATTENTION`` method is: a class without constructor arguments, one instance per process.

    Attributes:
        handles: which of :data:`HANDLES` it treats. A call that has one of the others is refused before it gets here. With
            ``"dense_mask"`` it takes four-dimensional masks: sliding windows, static caches while decoding, compiled models.
    """

    handles: frozenset[str]

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Return the output ``(batch, queries, heads, dim_v)``, contiguous, and the weights or ``None``."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall:
    """What one layer asks for. The queries are the last ``queries`` of the ``keys`` positions (aligned bottom-right).

    Attributes:
        query: ``(batch, heads, queries, dim)``, after rotary embedding.
        key, value: ``(batch, kv_heads, keys, dim)`` and ``(…, dim_v)``, heads not repeated; unwritten slots of a static
            cache are already cut off, except under a four-dimensional mask.
        scaling: factor of the products of queries and keys.
        module: the attention layer.
        segments: ``(batch, keys)`` int32: 0 is padding, k >= 1 the packed document a token belongs to; tokens see their own
            document only, each of which is one unbroken run. ``None``: one document without padding, or ``mask`` says it.
        mask: ``(batch or 1, heads or 1, queries, keys)``, bool (``True``: attend) or additive; it then says everything,
            causality included.
        dropout: probability that a weight is dropped; 0 outside training.
        window: how many of the last keys a query sees in this layer; told for methods that want to know, ``mask`` has it.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``(heads,)`` learned sinks: one more score per row, which takes weight and gives nothing.
        position_bias: ``(batch or 1, heads or 1, queries, keys)``, added to the scores.
        causal: whether a query sees only keys up to its own position (read where ``mask`` is ``None``).
        layer_idx, config: the layer's index and configuration, where it has them.
        implementation: the name the method is registered under.
        output_attentions: whether the weights are asked for.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    module: nn.Module | None = None
    segments: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    causal: bool = True
    layer_idx: int | None = None
    config: Any = None
    implementation: str = ""
    output_attentions: bool = False

    @property
    def uniform(self) -> bool:
        """Whether every row is one document over all keys, without padding (read where ``mask`` is ``None``)."""
        return self.segments is None or _facts(self.segments)["uniform"]

    def rows(self) -> list[tuple[int, int, int]]:
        """``(batch index, start, stop)`` of every document among the keys, in order (read where ``mask`` is ``None``)."""
        if self.segments is None:
            return [(b, 0, self.key.shape[2]) for b in range(self.query.shape[0])]
        return _facts(self.segments)["rows"]

    def dense(self) -> Tensor | None:
        """The whole mask in four dimensions, bool or additive; ``None``: every query sees every key.

        Padding queries see padding keys, so that no row is without a key; what comes out of them means nothing.
        """
        if self.mask is not None:
            return self.mask
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.uniform:
            if not self.causal or queries == 1:
                return None
            return _causal(queries, keys, self.query.device)[None, None]
        assert self.segments is not None
        known = _facts(self.segments)
        if (queries, self.causal) not in known:  # all layers of a forward pass share it
            own = self.segments[:, keys - queries :, None] == self.segments[:, None, :]
            causal = _causal(queries, keys, own.device) if self.causal else own.new_ones(())
            known[queries, self.causal] = (own & causal)[:, None]
        return known[queries, self.causal]

    def exact(self) -> tuple[Tensor, Tensor | None]:
        """Exact attention of this call, whatever it combines; differentiable.

        The same kernel and arguments as transformers' sdpa where that knows the call, else an explicit softmax in fp32 or
        wider. Rows of padding queries are zero.

        Returns:
            ``(batch, queries, heads, dim_v)``, and the weights ``(batch, heads, queries, keys)`` where they are asked for.
        """
        weights = None
        if self.softcap is not None or self.s_aux is not None or self.output_attentions:
            out, weights = self._explicit()
        else:
            # torch aligns is_causal top-left: only for as many queries as keys is that the alignment meant here.
            plain = self.mask is None and self.causal and self.query.shape[2] == self.key.shape[2] and self.uniform
            out, _ = sdpa_attention_forward(
                _Heads(self.query.shape[1] // self.key.shape[1]), self.query, self.key, self.value,
                None if plain else self.dense(), dropout=self.dropout, scaling=self.scaling, is_causal=plain,
                position_bias=self.position_bias,
            )  # fmt: skip
        if self.mask is None and not self.uniform:
            assert self.segments is not None
            padding = self.segments[:, self.segments.shape[1] - out.shape[1] :] == 0
            out = out.masked_fill(padding[:, :, None, None], 0.0)
        return out, weights

    def _explicit(self) -> tuple[Tensor, Tensor | None]:
        groups, mask = self.query.shape[1] // self.key.shape[1], self.dense()
        key, value = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in (self.key, self.value))
        scores = (self.query @ key.transpose(2, 3)).to(torch.promote_types(self.query.dtype, torch.float32)) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.position_bias is not None:
            scores = scores + self.position_bias
        if mask is not None:
            hidden = torch.finfo(scores.dtype).min  # not -inf, whose softmax over a row without keys is NaN
            scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
        if self.s_aux is not None:
            sinks = self.s_aux.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill(~mask, 0.0)  # moves rows without keys only
        weights = nn.functional.dropout(weights, self.dropout, training=self.dropout > 0).to(value.dtype)
        out = (weights @ value).transpose(1, 2).contiguous()
        return out, weights if self.output_attentions else None

    def fallback(self, reason: str) -> tuple[Tensor, Tensor | None]:
        """:meth:`exact`, said in the log once per method and reason.

        Args:
            reason: completes "exact attention for …", e.g. ``"decoding"``.
        """
        if not torch.compiler.is_compiling() and (self.implementation, reason) not in _said:
            _said.add((self.implementation, reason))
            logger.warning("%s: exact attention for %s", self.implementation, reason)
        return self.exact()


_said: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class _Heads:
    """Stands for the layer where transformers' sdpa asks for the number of queries per key."""

    num_key_value_groups: int


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """``(queries, keys)`` bool, aligned bottom-right."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


# One tensor serves all layers of a forward pass; what is read off its values is read once, until somebody writes into it.
_known: Any = WeakTensorKeyDictionary()


def _about(tensor: Tensor) -> dict[Any, Any]:
    version = -1 if tensor.is_inference() else tensor._version
    found: dict[Any, Any] | None = _known.get(tensor)
    if found is None or found["version"] != version:
        found = _known[tensor] = {"version": version}
    return found


def _facts(segments: Tensor) -> dict[Any, Any]:
    known = _about(segments)  # also of inference tensors, whose writes torch does not count: these are made by the mask function
    if "rows" not in known:
        runs = _runs(segments)
        known |= {"rows": runs, "uniform": runs == [(b, 0, segments.shape[1]) for b in range(segments.shape[0])]}
    return known


def restarts(positions: Tensor) -> bool:
    """Whether positions ``(batch, tokens)`` go back to 0 inside a row: several documents, or padding on the left."""
    known = {} if positions.is_inference() else _about(positions)  # the caller's own, who may write into it
    if "restarts" not in known:
        known["restarts"] = bool((positions[:, 1:] == 0).any())
    return bool(known["restarts"])


def _runs(segments: Tensor) -> list[tuple[int, int, int]]:
    host = segments.cpu()
    edges = host.new_ones(host.shape[0], host.shape[1] + 1, dtype=torch.bool)
    edges[:, 1:-1] = host[:, 1:] != host[:, :-1]
    starts = [edge.nonzero()[:, 0].tolist() for edge in edges]
    return [(b, i, k) for b, row in enumerate(starts) for i, k in pairwise(row) if host[b, i] > 0]
