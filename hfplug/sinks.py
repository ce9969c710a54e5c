"""Sink scores by a chunked pass over the queries: no attention map is ever stored.

The score of token ``i`` in one head is the mean attention it gets from the queries that can see it
(SinkProbe, arXiv 2604.10697, Eq. 1; whether the query ``i`` itself counts is open in the public text, so it is a flag)::

    s_i = (1 / n_i) sum_{u sees i} a_{u,i},      a = softmax(scaling * q k^T),      n_i = T - i for a causal map
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hfplug.errors import ConfigError
from hfplug.visibility import Block, Pairs

# Elements of a tile on a CPU: 2 MiB of logits and as much of weights, measured best at 4096 keys with 2 MiB of L2 cache.
_TILE = 1 << 19
_LEAST_ROWS = 16


@dataclass(frozen=True)
class SinkScores:
    """Column statistics of an attention map, over the queries that stand for real tokens and count.

    Attributes:
        sums: ``(batch, heads, keys)`` fp32, attention each key received in all.
        diagonal: ``(batch, heads, keys)`` fp32, what it received from its own query (0 for keys without one).
        queries: ``(batch, 1 or heads, keys)`` fp32, how many counted queries can see it.
        real: ``(batch, queries)`` bool, queries that stand for a token rather than for padding.
        starts: ``(batch, queries)`` bool, real tokens that see no token before them in place: the first of a row, of a packed
            document, or of an attention chunk.
        own: ``(batch, keys)`` fp32, 1 where the key has a counted query of its own.
        argmax: ``(batch, heads, keys)`` fp32, queries whose largest weight is on it; ``None`` unless asked for.
        log_diagonal: ``(batch, heads, keys)`` fp32, logarithm of ``diagonal``, also where that underflows to 0 (0 for keys
            without a counted query of their own); ``None`` unless asked for.
    """

    sums: Tensor
    diagonal: Tensor
    queries: Tensor
    real: Tensor
    starts: Tensor
    own: Tensor
    argmax: Tensor | None = None
    log_diagonal: Tensor | None = None

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
    counted: Tensor | None = None,
    argmax: bool = False,
    log_diagonal: bool = False,
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
        chunk: most query rows (over the whole batch) scored at a time.
        causal: queries see no later key. Ignored with a 4-D mask, as are the next two.
        window: number of keys a query sees, itself included.
        documents: ``(batch, keys)`` int, packed document of each key; queries see their own document only.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``(heads,)`` learned sink logits (``s_aux``): they enter the denominator and draw mass from the keys.
        counted: ``(batch, queries)`` bool, the queries whose attention counts, of the real ones; ``None``: all of them.
        argmax: also count, per key, the queries whose largest weight it has.
        log_diagonal: also the logarithm of the diagonal, which does not underflow.

    Raises:
        ConfigError: shapes that do not fit, or ``chunk`` below 1.
        UnsupportedError: ``window`` without ``causal``.
    """
    pairs = Pairs(query, key, mask, causal, window, documents)
    tally = _Tally(query, key, pairs, counted, argmax, log_diagonal)
    tally.run(query, key, None, scaling, softcap, sinks, chunk)
    return tally.scores()


@torch.no_grad()
def attend_and_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    chunk: int = 256,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counted: Tensor | None = None,
    argmax: bool = False,
    log_diagonal: bool = False,
) -> tuple[Tensor, SinkScores]:
    """Exact attention and the scores of its map in one pass: where no gradient is needed, cheaper than one after the other.

    Args:
        value: ``(batch, kv heads, keys, dim of values)``.
        query, key, mask, scaling, chunk, causal, window, documents, softcap, sinks: as for :func:`sink_scores`.
        counted, argmax, log_diagonal: as well; they do not concern the output.

    Returns:
        ``(batch, heads, queries, dim of values)`` in the dtype of ``value``, computed in fp32, 0 for queries that see nothing;
        and the scores.

    Raises:
        ConfigError: as :func:`sink_scores`; or ``value`` does not fit ``key``.
        UnsupportedError: as :func:`sink_scores`.
    """
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ConfigError(f"value {tuple(value.shape)} does not fit key {tuple(key.shape)}")
    pairs = Pairs(query, key, mask, causal, window, documents)
    tally = _Tally(query, key, pairs, counted, argmax, log_diagonal)
    out = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    tally.run(query, key, (value.float(), tally.grouped(out)), scaling, softcap, sinks, chunk)
    return out.to(value.dtype), tally.scores()


class _Tally:
    """The chunked pass and its sums.

    On a CPU every key head has a tile of its own, small enough for the cache; elsewhere all heads share one, to save launches.
    """

    def __init__(
        self, query: Tensor, key: Tensor, pairs: Pairs, counted: Tensor | None, argmax: bool, log_diagonal: bool
    ) -> None:
        self.batch, self.heads, self.length, _ = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[2]
        if self.kv_heads == 0 or self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads cannot share {self.kv_heads} key heads")
        self.pairs, self.on_cpu = pairs, query.device.type == "cpu"
        self.real, self.starts = pairs.tokens()
        if counted is not None and counted.shape != self.real.shape:
            raise ConfigError(f"counted {tuple(counted.shape)} must be {tuple(self.real.shape)}")
        self.counted = self.real if counted is None else self.real & counted.bool()
        self.all_count = self.on_cpu and bool(self.counted.all())  # elsewhere asking would wait for the device
        shape = self.batch, self.heads, self.keys
        self.sums, self.diagonal = (query.new_zeros(shape, dtype=torch.float32) for _ in range(2))
        self.log_diagonal = torch.zeros_like(self.sums) if log_diagonal else None
        self.wins = torch.zeros_like(self.sums) if argmax else None
        self.queries = query.new_zeros((self.batch, 1, self.keys), dtype=torch.float32)

    def grouped(self, tensor: Tensor) -> Tensor:
        """``(batch, heads, ...)`` as ``(batch, kv heads, heads of each, ...)``; one head for all stays 1."""
        return tensor.unflatten(1, (self.kv_heads if tensor.shape[1] > 1 else 1, -1))

    def run(
        self, query: Tensor, key: Tensor, output: tuple[Tensor, Tensor] | None, scaling: float | None, softcap: float | None,
        sinks: Tensor | None, chunk: int,
    ) -> None:  # fmt: skip
        """Go through the queries once; ``output``: the values, and the grouped tensor that takes the attention's output."""
        if chunk < 1:
            raise ConfigError(f"chunk={chunk} must be 1 or more")
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        extra = None if sinks is None else self.grouped(sinks.float().view(1, -1, 1, 1))
        # Autocast would take the products back to 16 bits.
        with torch.autocast(query.device.type, enabled=False):
            queries, keys = self.grouped(query), key.float().transpose(2, 3)
            begin = 0
            while begin < self.length:
                end = self._end(begin, chunk)
                block = self.pairs.block(begin, end)
                self._count(block, begin, end)
                for at in self._tiles(block, end - begin):
                    scaled = queries[at][:, :, :, begin:end].float() * scaling
                    part = _part(block, at, self.grouped)
                    logits = _logits(scaled, keys[at][..., block.low : block.high], part, softcap)
                    weights, total = _weights(logits, None if extra is None else extra[:, at[1]])
                    if output is not None:
                        rows = torch.matmul(weights.flatten(2, 3), output[0][at][:, :, block.low : block.high])
                        rows = rows.view(*weights.shape[:4], -1)
                        if part.keep is not None and part.free == 0:
                            rows.masked_fill_(~part.keep.any(dim=-1, keepdim=True), 0.0)
                        output[1][at][:, :, :, begin:end] = rows
                    self._add(at, block, logits, weights, total, begin, end)
                begin = end

    def _end(self, begin: int, chunk: int) -> int:
        end = min(begin + max(1, chunk // self.batch), self.length)
        if not self.on_cpu:
            return end
        low, high = self.pairs.span(begin, end)
        return min(end, begin + max(_LEAST_ROWS, _TILE * self.kv_heads // (self.heads * (high - low))))

    def _tiles(self, block: Block, rows: int) -> list[tuple[slice, slice]]:
        """Indices ``[rows of the batch, key heads]`` of what is taken at once."""
        if not self.on_cpu or self.batch * self.heads * rows * (block.high - block.low) <= _TILE:
            return [(slice(0, self.batch), slice(0, self.kv_heads))]
        return [(slice(b, b + 1), slice(h, h + 1)) for b in range(self.batch) for h in range(self.kv_heads)]

    def _count(self, block: Block, begin: int, end: int) -> None:
        """Add the queries ``begin:end`` to the number that can see each key."""
        here, free = self.counted[:, None, begin:end, None], block.low + block.free
        if block.keep is not None and block.keep.shape[1] > self.queries.shape[1]:
            self.queries = self.queries.repeat(1, block.keep.shape[1], 1)
        self.queries[:, :, block.low : free] += here.sum(dim=2)
        if block.keep is not None:
            self.queries[:, :, free : block.high] += (block.keep & here).sum(dim=2, dtype=torch.float32)

    def _add(
        self, at: tuple[slice, slice], block: Block, logits: Tensor, weights: Tensor, total: Tensor | None, begin: int, end: int
    ) -> None:
        place, offset = torch.arange(end - begin, device=weights.device), self.keys - self.length
        own = slice(begin + offset, end + offset)
        here = self.counted[at[0], None, None, begin:end]
        column = place + (begin + offset - block.low)
        if self.log_diagonal is not None:
            if total is None:  # from the largest weight of a row, which does not underflow
                total = logits.amax(dim=-1, keepdim=True) - weights.amax(dim=-1, keepdim=True).log()
            found = logits[..., place, column] - total[..., 0]
            self.grouped(self.log_diagonal)[at][..., own] = found.masked_fill(~here, 0.0)
        if not self.all_count:
            weights.masked_fill_(~here[..., None], 0.0)  # not a product: rows of padding may hold NaN
        self.grouped(self.sums)[at][..., block.low : block.high] += weights.sum(dim=3)
        self.grouped(self.diagonal)[at][..., own] = weights[..., place, column]
        if self.wins is not None:
            best = weights.argmax(dim=-1)
            self.grouped(self.wins)[at].scatter_add_(3, best + block.low, here.expand_as(best).float())

    def scores(self) -> SinkScores:
        """The sums so far."""
        own = torch.nn.functional.pad(self.counted.float(), (self.keys - self.length, 0))
        return SinkScores(
            self.sums, self.diagonal, self.queries, self.real, self.starts, own, self.wins, self.log_diagonal
        )  # fmt: skip


def _part(block: Block, at: tuple[slice, slice], grouped: Callable[[Tensor], Tensor]) -> Block:
    """The block with its masks grouped and cut to a tile; a dimension of 1 stands for all."""

    def cut(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        mask = grouped(mask)
        return mask[at[0] if mask.shape[0] > 1 else slice(None), at[1] if mask.shape[1] > 1 else slice(None)]

    return block._replace(keep=cut(block.keep), bias=cut(block.bias))


def _logits(query: Tensor, key: Tensor, block: Block, softcap: float | None) -> Tensor:
    """``(batch, kv heads, heads of each, queries, keys)``, -inf where masked."""
    logits = torch.matmul(query.flatten(2, 3), key).view(*query.shape[:4], key.shape[3])
    if softcap is not None:
        logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
    if block.bias is not None:
        logits += block.bias
    if block.keep is not None:
        logits[..., block.free :].masked_fill_(~block.keep, float("-inf"))
    return logits


def _weights(logits: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The softmax, NaN for rows without a key; with a learned sink also the logarithm of the denominator."""
    if extra is None:
        return torch.softmax(logits, dim=-1), None
    total = torch.logaddexp(torch.logsumexp(logits, dim=-1, keepdim=True), extra)
    return torch.exp(logits - total), total


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
