"""Sink scores by a chunked pass over the queries: no attention map is ever stored.

The score of token ``i`` in one head is the mean attention it gets from the queries that can see it
(SinkProbe, arXiv 2604.10697, Eq. 1; whether the query ``i`` itself counts is open in the public text, so it is a flag)::

    s_i = (1 / n_i) sum_{u sees i} a_{u,i},      a = softmax(scaling * q k^T),      n_i = T - i for a causal map
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfplug import ConfigError, UnsupportedError


@dataclass(frozen=True)
class SinkScores:
    """Column statistics of an attention map, over the queries that stand for real tokens.

    Attributes:
        sums: ``(batch, heads, keys)`` fp32, attention each key received in all.
        diagonal: ``(batch, heads, keys)`` fp32, what it received from its own query (0 for keys without one).
        queries: ``(batch, 1 or heads, keys)`` fp32, how many real queries can see it.
        real: ``(batch, queries)`` bool, queries that stand for a token rather than for padding.
        starts: ``(batch, queries)`` bool, real tokens that see no token before them in place: the first of a row, of a packed
            document, or of an attention chunk.
        own: ``(batch, keys)`` fp32, 1 where the key has a real query of its own.
        argmax: ``(batch, heads, keys)`` fp32, queries whose largest weight is on it; ``None`` unless asked for.
    """

    sums: Tensor
    diagonal: Tensor
    queries: Tensor
    real: Tensor
    starts: Tensor
    own: Tensor
    argmax: Tensor | None = None

    def count(self, include_self: bool = True) -> Tensor:
        """``(batch, 1 or heads, keys)`` fp32: the denominators of :meth:`scores`."""
        return self.queries if include_self else self.queries - self.own[:, None]

    def scores(self, include_self: bool = True) -> Tensor:
        """``(batch, heads, keys)`` fp32 in [0, 1]: the mean attention a key gets; 0 where no query can see it.

        Args:
            include_self: whether the token's own query counts. If not, the last token of a causal map scores 0.
        """
        sums = self.sums if include_self else self.sums - self.diagonal
        count = self.count(include_self)
        return torch.where(count > 0, sums / count.clamp(min=1), 0.0).clamp(min=0.0)


@torch.no_grad()
def sink_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    chunk: int = 256,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    argmax: bool = False,
) -> SinkScores:
    """Attention received by every key, from queries and keys as an attention function gets them (after RoPE).

    Args:
        query: ``(batch, heads, queries, dim)``, any float dtype; computed in fp32.
        key: ``(batch, kv heads, keys, dim)``; heads are shared among groups of query heads (GQA), not repeated here.
            With more keys than queries, the queries are the last positions.
        mask: ``(batch or 1, heads or 1, queries, keys)``, bool (true: attend) or float (added to the logits, minimum or
            -inf: not attended), which alone says who sees whom; or ``(batch, keys)``, true or 1 for real tokens, applied on
            top of ``causal``, ``window`` and ``documents``; or ``None``: all tokens are real.
        scaling: factor of the logits; ``None``: ``dim ** -0.5``.
        chunk: query rows (over the whole batch) scored at a time.
        causal: queries see no later key. Ignored with a 4-D mask, as are the next two.
        window: number of keys a query sees, itself included.
        documents: ``(batch, keys)`` int, packed document of each key; queries see their own document only.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``(heads,)`` learned sink logits (``s_aux``): they enter the denominator and draw mass from the keys.
        argmax: also count, per key, the queries whose largest weight it has.

    Raises:
        ConfigError: shapes that do not fit, or ``chunk`` below 1.
        UnsupportedError: ``window`` without ``causal``.
    """
    pairs = _Pairs(query, key, mask, causal, window, documents)
    (batch, heads, length, dim), keys = query.shape, key.shape[2]
    if chunk < 1:
        raise ConfigError(f"chunk={chunk} must be 1 or more")
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ConfigError(f"{heads} query heads cannot share {key.shape[1]} key heads")
    scaling = dim**-0.5 if scaling is None else scaling
    rows = max(1, chunk // batch)
    real, starts = pairs.tokens()
    offset = keys - length
    # Autocast would take the product back to 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        sums, diagonal = (query.new_zeros((batch, heads, keys), dtype=torch.float32) for _ in range(2))
        wins = torch.zeros_like(sums) if argmax else None
        queries: Tensor | float = 0.0
        transposed = key.float().transpose(2, 3)[:, :, None]
        extra = sinks.float().view(1, heads, 1, 1) if sinks is not None else None
        for begin in range(0, length, rows):
            end = min(begin + rows, length)
            seen = pairs.reach(end)
            part = query[:, :, begin:end].float().reshape(batch, key.shape[1], -1, end - begin, dim)
            logits = torch.matmul(part, transposed[..., :seen]).view(batch, heads, end - begin, seen).mul_(scaling)
            if softcap is not None:
                logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
            keep, bias = pairs.block(begin, end)
            if bias is not None:
                logits += bias
            logits.masked_fill_(~keep, float("-inf"))
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            if extra is not None:
                total = torch.logaddexp(total, extra)
            weights = logits.sub_(total).exp_()
            here = real[:, None, begin:end, None]
            weights.masked_fill_(~here, 0.0)  # not a product: rows of padding may hold NaN
            sums[:, :, :seen] += weights.sum(dim=2)
            place = torch.arange(begin, end, device=query.device)
            diagonal[:, :, offset + begin : offset + end] = weights[:, :, place - begin, place + offset]
            visible = (keep & here).sum(dim=2, dtype=torch.float32)
            queries = queries + torch.nn.functional.pad(visible, (0, keys - seen))
            if wins is not None:
                weight = real[:, None, begin:end].expand(batch, heads, -1).float()
                wins.scatter_add_(2, weights.argmax(dim=-1), weight)
    own = torch.nn.functional.pad(real.float(), (offset, 0))
    if not isinstance(queries, Tensor):
        queries = torch.zeros_like(own)[:, None]
    return SinkScores(sums, diagonal, queries.expand(batch, -1, -1), real, starts, own, wins)


class _Pairs:
    """Which query sees which key, produced block by block so that nothing of size queries x keys is made."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        causal: bool,
        window: int | None,
        documents: Tensor | None,
    ) -> None:
        if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
            raise ConfigError(f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit together")
        self.batch, self.length, self.keys, self.device = query.shape[0], query.shape[2], key.shape[2], query.device
        if self.keys < self.length:
            raise ConfigError(f"{self.length} queries but only {self.keys} keys")
        if window is not None and not causal:
            raise UnsupportedError(f"window={window} without causal attention is not supported")
        self.mask: Tensor | None = None
        self.padding: Tensor | None = None
        self.causal, self.window, self.documents = causal, window, documents
        if mask is not None and mask.dim() == 4:
            fits = all(a in (b, 1) for a, b in zip(mask.shape[:2], query.shape[:2], strict=True))
            if not fits or mask.shape[2:] != (self.length, self.keys):
                raise ConfigError(
                    f"mask {tuple(mask.shape)} does not fit {tuple(query.shape[:3])} queries and {self.keys} keys"
                )
            self.mask = mask
        elif mask is not None:
            if tuple(mask.shape) != (self.batch, self.keys):
                raise ConfigError(f"mask {tuple(mask.shape)} must have 4 dimensions or be ({self.batch}, {self.keys})")
            self.padding = mask.bool()
        if documents is not None and tuple(documents.shape) != (self.batch, self.keys):
            raise ConfigError(f"documents {tuple(documents.shape)} must be ({self.batch}, {self.keys})")

    def reach(self, end: int) -> int:
        """Number of keys the queries up to ``end`` can see at most: half of the product is never computed."""
        return end + self.keys - self.length if self.mask is None and self.causal else self.keys

    def block(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """``(keep, bias)`` of the queries ``begin:end``, broadcastable to ``(batch, heads, end - begin, reach(end))``."""
        if self.mask is not None:
            return _split(self.mask[:, :, begin:end])
        place, offset = torch.arange(self.keys, device=self.device), self.keys - self.length
        return self._sees(place[begin + offset : end + offset, None], place[None, : self.reach(end)]), None

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        # query and key are broadcastable positions; the result has two leading dimensions, batch (or 1) and heads (1).
        keep = torch.ones_like(query - key, dtype=torch.bool)[None]
        if self.causal:
            keep = keep & (key <= query)
        if self.window is not None:
            keep = keep & (key > query - self.window)
        if self.padding is not None:
            keep = keep & self.padding[:, key]
        if self.documents is not None:
            keep = keep & (self.documents[:, query] == self.documents[:, key])
        return keep[:, None]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """``(real, starts)``, each ``(batch, queries)`` bool; see :class:`SinkScores`.

        A padding token cannot see itself, whichever side it is on and whatever its garbage row of the softmax looks like.
        """
        offset = self.keys - self.length
        if self.mask is not None:
            diagonal = torch.diagonal(self.mask, offset=offset, dim1=2, dim2=3)
            before = torch.diagonal(self.mask, offset=offset - 1, dim1=2, dim2=3)  # lacks query 0 when offset is 0
            real, sees_before = (_split(part)[0].any(dim=1) for part in (diagonal, before))
        else:
            place = torch.arange(self.keys, device=self.device)
            mine, former = place[offset:], place[max(offset - 1, 0) : self.keys - 1]
            real = self._sees(mine, mine)[:, 0]
            sees_before = self._sees(mine[len(mine) - len(former) :], former)[:, 0]
        real = real.expand(self.batch, -1)
        missing = self.length - sees_before.shape[1]
        sees_before = torch.nn.functional.pad(sees_before.expand(self.batch, -1), (missing, 0))
        return real, real & ~sees_before


def _split(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.dtype.is_floating_point:
        raise ConfigError(f"a 4-D mask must be bool or floating point, not {mask.dtype}")
    # Half of the minimum: transformers adds the minimum itself, and sums of two masks overflow to -inf.
    keep = mask > torch.finfo(mask.dtype).min / 2
    return keep, mask.float()


def value_norm_ratio(value: Tensor, real: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """``||v_first|| / median_j ||v_j||`` of every document, summed over documents, and the number of documents.

    The median is over the real tokens of the document, the mean of the two middle ones for an even number, and the ratio
    is the mean over key-value heads. Small for the usual sink on the first token, whose value is near zero.

    Args:
        value: ``(batch, kv heads, tokens, dim)``.
        real: ``(batch, tokens)`` bool.
        starts: ``(batch, tokens)`` bool; a document reaches from one start to the next.

    Returns:
        Two 0-d fp32 tensors, the sum and the count. Documents whose median is 0 in some head are left out.
    """
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        batch, heads, length, _ = value.shape
        norms = torch.linalg.vector_norm(value.float(), dim=-1).masked_fill(~real[:, None], 0.0)
        # Document of each token; padding goes to one of its own behind them all, so that it sorts last.
        document = torch.where(real, starts.cumsum(dim=1) - 1, length).clamp(min=0)
        size = norms.new_zeros((batch, length + 1)).scatter_add_(1, document, torch.ones_like(document).float())
        size = size[:, :length].long()
        first = (size.cumsum(dim=1) - size).clamp(max=length - 1)  # where a document begins once padding is moved to the end
        grouped = norms.gather(2, document.argsort(dim=1, stable=True)[:, None].expand(-1, heads, -1))
        # Sorted by norm, then stably by document: every document's norms in order, one document after the other.
        by_norm = norms.argsort(dim=2)
        by_document = document[:, None].expand(-1, heads, -1).gather(2, by_norm).argsort(dim=2, stable=True)
        ordered = norms.gather(2, by_norm.gather(2, by_document))

        def at(index: Tensor, of: Tensor) -> Tensor:
            return of.gather(2, index.clamp(0, length - 1)[:, None].expand(-1, heads, -1))

        median = (at(first + (size - 1) // 2, ordered) + at(first + size // 2, ordered)) / 2
        usable = (size > 0) & (median > 0).all(dim=1)
        ratio = (at(first, grouped) / median).mean(dim=1)
        return torch.where(usable, ratio, 0.0).sum(), usable.sum().float()


def attention_arguments(
    implementation: str, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """What ``query, key, mask, options`` of an attention function of transformers mean, as arguments of :func:`sink_scores`.

    Implementations read the mask differently: for ``sdpa`` a missing mask is causal, for ``eager`` it is none at all, flash
    attention takes padding as ``(batch, keys)`` and packing from the positions, flex attention a ``BlockMask``.

    Args:
        implementation: name in the ``AttentionInterface``.
        module: the attention module.
        query: ``(batch, heads, queries, dim)``.
        key: ``(batch, kv heads, keys, dim)``.
        mask: whatever the model made for this implementation.
        options: the remaining keyword arguments of the call.

    Raises:
        UnsupportedError: something in the call changes the weights in a way not known here.
    """
    if options.get("position_bias") is not None:
        raise UnsupportedError("attention with a position bias is not measured")
    length, keys = query.shape[2], key.shape[2]
    if length != keys:
        raise UnsupportedError(f"{keys} keys for {length} queries: attention to a cache or a prefix is not measured")
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    found: dict[str, Any] = {"softcap": options.get("softcap"), "sinks": options.get("s_aux"), "causal": causal}
    if implementation == "sdpa":
        if found["sinks"] is not None:
            raise UnsupportedError("sdpa ignores the learned sinks (s_aux) this model has; use eager or flex_attention")
        found["mask"] = mask
    elif implementation == "eager":
        found |= {"mask": mask if mask is None else mask[..., :keys], "causal": False}
    elif implementation == "flex_attention":
        found |= {"mask": _dense(mask, query, keys), "causal": False}
    elif "flash" in implementation:
        found |= {"mask": mask, "window": options.get("sliding_window"), "documents": _packed(query, options)}
    else:
        raise UnsupportedError(
            f"attention implementation {implementation!r} is not one whose weights and mask are known: "
            "sdpa, eager, flex_attention, flash_attention_*"
        )
    if found["mask"] is not None and found["mask"].dim() not in (2, 4):
        raise UnsupportedError(f"an attention mask of shape {tuple(found['mask'].shape)} is not understood")
    return found


def _dense(mask: Any, query: Tensor, keys: int) -> Tensor | None:
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return mask[..., :keys]
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, query.shape[0], None, query.shape[2], keys, device=query.device)


def _packed(query: Tensor, options: dict[str, Any]) -> Tensor | None:
    # The two ways flash attention learns of packed documents; both only for a batch of one row.
    batch, _, length, _ = query.shape
    boundaries, positions = options.get("cu_seq_lens_q"), options.get("position_ids")
    if boundaries is not None:
        place = torch.arange(length, device=query.device)
        return torch.bucketize(place, boundaries.to(place)[1:], right=True)[None]
    if positions is None or batch != 1 or positions.dim() != 2 or positions.shape[1] != length:
        return None
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(dim=1)
