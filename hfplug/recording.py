"""Scores of the attention that tokens receive, recorded while a model runs as it is: any implementation, prefill and decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from hfplug.calls import Call, call_scope, token_stack
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.observe import Observer, attention_arguments, attention_modules, choose_layers, observe
from hfplug.sinks import SinkScores, sink_scores

_ACTIVE: list[Recorder] = []
# What a cache can be asked for that the sums recorded so far could not follow.
_ROWS = "reorders the rows of a recorded cache"
_FORBIDDEN = {
    "reorder_cache": _ROWS, "batch_repeat_interleave": _ROWS, "batch_select_indices": _ROWS,
    "crop": "takes tokens back whose attention is in the sums",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Recording:
    """What one batch of sequences received so far, from its first token on.

    Attributes:
        tokens: length of the sequences, padding included.
        per_layer: layer index -> :class:`~hfplug.sinks.SinkScores` whose ``keys`` and ``queries`` are both all ``tokens``.
        value_norms: layer index -> ``(batch, kv heads, tokens)`` fp32 norms of the values; empty unless asked for.
    """

    tokens: int
    per_layer: dict[int, SinkScores]
    value_norms: dict[int, Tensor]
    _cache: Any = dataclasses.field(default=None, repr=False)

    @property
    def layers(self) -> list[int]:
        """Indices of the recorded layers, ascending."""
        return sorted(self.per_layer)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return next(iter(self.per_layer.values())).sums.shape[0]

    @property
    def real(self) -> Tensor:
        """``(batch, tokens)`` bool: tokens that are not padding."""
        return next(iter(self.per_layer.values())).real

    def scores(self, layer: int, include_self: bool = True) -> Tensor:
        """``(batch, heads, tokens)`` fp32: the mean attention each token received in a layer.

        Raises:
            ConfigError: the layer was not recorded.
        """
        if layer not in self.per_layer:
            raise ConfigError(f"layer={layer} was not recorded; recorded: {self.layers}")
        return self.per_layer[layer].scores(include_self)

    def copied(self, batch: int) -> Recording:
        """A copy to continue from; one row may become ``batch`` equal ones."""
        if self.batch not in (1, batch):
            raise UnsupportedError(f"prefix of {self.batch} rows for a batch of {batch}")

        def spread(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.expand(batch, *value.shape[1:]).clone()

        layers = {i: SinkScores(*(spread(getattr(s, f.name)) for f in dataclasses.fields(s))) for i, s in self.per_layer.items()}  # type: ignore[arg-type]
        norms = {i: n.expand(batch, *n.shape[1:]).clone() for i, n in self.value_norms.items()}
        return Recording(self.tokens, layers, norms)


def _joined(former: SinkScores | None, step: SinkScores, total: int) -> SinkScores:
    """The sums of a sequence with those of its next queries, whose keys are its last ones up to ``total``."""
    keys = step.sums.shape[2]

    def widened(value: Tensor, new: int) -> Tensor:
        return torch.nn.functional.pad(value, (total - new, 0))

    moved = [widened(v, keys) for v in (step.sums, step.diagonal, step.queries, step.own)]
    logarithm = None if step.log_diagonal is None else widened(step.log_diagonal, keys)
    real, starts = step.real, step.starts
    if former is not None:
        grown = total - former.sums.shape[2]

        def added(before: Tensor, value: Tensor) -> Tensor:
            return value + torch.nn.functional.pad(before, (0, grown))

        moved = [added(b, v) for b, v in zip((former.sums, former.diagonal, former.queries, former.own), moved, strict=True)]
        if logarithm is not None and former.log_diagonal is not None:
            logarithm = added(former.log_diagonal, logarithm)
        real, starts = torch.cat([former.real, real], dim=1), torch.cat([former.starts, starts], dim=1)
    sums, diagonal, queries, own = moved
    return SinkScores(sums, diagonal, queries, real, starts, own, None, logarithm)


class Recorder(Sequence[Recording]):
    """The recordings of one :func:`record` block: one for each call that began a sequence, in order."""

    def __init__(
        self, model: nn.Module, layers: Sequence[int] | None, counted: Tensor | None, chunk: int, log_diagonal: bool,
        value_norms: bool, prefix: Recording | None, score: Callable[..., SinkScores],
    ) -> None:  # fmt: skip
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedError("encoder-decoder models are not recorded")
        self._interfaces, self._modules = attention_modules(token_stack(model))
        self.layers = choose_layers(layers, self._modules.values())
        self.counted, self.value_norms, self.prefix, self.score = counted, value_norms, prefix, score
        self.options: dict[str, Any] = {"chunk": chunk, "log_diagonal": log_diagonal}
        self._ledger = Ledger("recording")
        self._recordings: list[Recording] = []
        self._guarded: set[type[Any]] = set()
        self._scope = call_scope(model)

    # -- what the user reads ----------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> Recording: ...
    @overload
    def __getitem__(self, index: slice) -> list[Recording]: ...
    def __getitem__(self, index: int | slice) -> Recording | list[Recording]:
        return self._recordings[index]

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def last(self) -> Recording:
        """The recording of the sequences that began last.

        Raises:
            ConfigError: the model has not run.
        """
        if not self._recordings:
            raise ConfigError("nothing is recorded: the model has not run inside the block")
        return self._recordings[-1]

    def scores(self, layer: int, include_self: bool = True) -> Tensor:
        """:meth:`Recording.scores` of :attr:`last`."""
        return self.last.scores(layer, include_self)

    def clear(self) -> None:
        """Forget the finished recordings; sequences still decoding can then not be continued."""
        self._recordings.clear()

    # -- looking on -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        try:
            self._scope.join(self._user, self._end)
            self._ledger.hook(self._scope.stack, "forward_pre", self._begin)
            observe(self._ledger, self._interfaces, self._observer)
        except BaseException:
            self.__exit__()
            raise
        _ACTIVE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        try:
            self._ledger.undo()
        finally:
            self._scope.leave(self._user)
            for recording in self._recordings:
                recording._cache = None  # it would keep the keys and values in memory

    @property
    def _user(self) -> str:
        return f"recording:{id(self)}"

    def _begin(self, stack: nn.Module, args: Any) -> None:
        call = self._scope.current
        if call is None:
            return
        if call.batch == 0:
            raise UnsupportedError("the model was called with neither input_ids nor inputs_embeds")
        former = None if call.past == 0 else self._former(call)
        self._guard(call.cache)
        call.memo[self] = (former, {}, {})

    def _former(self, call: Call) -> Recording:
        for recording in reversed(self._recordings):
            if recording._cache is call.cache:
                if recording.tokens != call.past:
                    break
                return recording
        else:
            if self.prefix is not None and self.prefix.tokens == call.past:
                return self.prefix.copied(call.batch)
        raise UnsupportedError(
            f"the cache holds {call.past} tokens whose queries were not recorded, so what their keys received is not known: "
            "run the prefix inside the same block, or record it and pass that recording as prefix="
        )

    def _observer(self) -> Observer | None:
        call = self._scope.current
        # A call that is recomputed by gradient checkpointing has ended, and was counted then.
        return None if call is None or self not in call.memo else self._look

    @torch.no_grad()
    def _look(self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
              options: dict[str, Any]) -> None:  # fmt: skip
        call, layer = self._scope.current, self._modules.get(id(module))
        if call is None or layer not in self.layers or layer in call.memo[self][1]:
            return
        key, value = (_written(call, layer, tensor) for tensor in (key, value))
        found = attention_arguments(implementation, module, query, key, mask, options, cached=call.cache is not None)
        scored = self.score(query, key, scaling=options.get("scaling"), **self.what(call), **found)
        self.take(call, layer, scored, value)

    def what(self, call: Call) -> dict[str, Any]:
        """Options of :func:`~hfplug.sinks.sink_scores` for a call: chunk, logarithm, and which of its queries count."""
        if self.counted is None:
            return self.options
        total = call.past + call.length
        if self.counted.shape[0] != call.batch or self.counted.shape[1] < total:
            raise ConfigError(f"counted {tuple(self.counted.shape)} does not cover {call.batch} rows of {total} tokens")
        return {**self.options, "counted": self.counted[:, call.past : total]}

    def take(self, call: Call, layer: int, scored: SinkScores, value: Tensor) -> None:
        """Keep the scores of one layer in a call until it ends."""
        _, scores, norms = call.memo[self]
        scores[layer] = scored
        if self.value_norms:
            norms[layer] = torch.linalg.vector_norm(value[:, :, -call.length :].float(), dim=-1)

    def _end(self, call: Call) -> None:
        former, scores, norms = call.memo.pop(self, (None, None, None))
        if scores is None:
            return
        if missing := sorted(self.layers - set(scores)):
            raise UnsupportedError(
                f"layers {missing} were not seen: their attention did not ask transformers' AttentionInterface for its function "
                "(own attention code, or torch.compile)"
            )
        total = call.past + call.length
        fresh = former is None or former not in self._recordings
        recording = former or Recording(0, {}, {})
        for layer, scored in scores.items():
            recording.per_layer[layer] = _joined(recording.per_layer.get(layer), scored, total)
        for layer, norm in norms.items():
            before = recording.value_norms.get(layer)
            recording.value_norms[layer] = norm if before is None else torch.cat([before, norm], dim=2)
        recording.tokens, recording._cache = total, call.cache
        self._guard(call.cache)
        if fresh:
            for other in self._recordings:  # a cache that was reset begins anew
                if other._cache is call.cache:
                    other._cache = None
            self._recordings.append(recording)

    def _guard(self, cache: Any) -> None:
        """Refuse, while the block runs, what the sums could not follow; on the class, so that copies of a cache stay whole."""
        kind = type(cache)
        if cache is None or kind in self._guarded:
            return
        self._guarded.add(kind)
        for name, why in _FORBIDDEN.items():
            if hasattr(kind, name):
                self._ledger.set_attr(kind, name, self._refusing(getattr(kind, name), name, why))

    def _refusing(self, function: Callable[..., Any], name: str, why: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def refusing(cache: Any, *args: Any, **kwargs: Any) -> Any:
            changes = name != "crop" or (args or tuple(kwargs.values()))[0] != 0
            if changes and any(recording._cache is cache for recording in self._recordings):
                raise UnsupportedError(
                    f"{name}() {why} (beam search, assisted decoding): record greedy or sampled generation, or the finished text "
                    "in one forward"
                )
            return function(cache, *args, **kwargs)

        return refusing


def _written(call: Call, layer: int, states: Tensor) -> Tensor:
    """Keys or values up to the last query, without slots of a static cache that nothing was written to."""
    from transformers import cache_utils

    total, length = call.past + call.length, states.shape[2]
    if length == total:
        return states
    layers = getattr(call.cache, "layers", [])
    kind = type(layers[layer]) if layer < len(layers) else None
    if length > total and kind in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        return states[:, :, :total]
    if length < total and kind is cache_utils.DynamicSlidingWindowLayer:
        return states  # the last ones
    where = "no cache" if call.cache is None else f"a {kind.__name__ if kind else type(call.cache).__name__}"
    raise UnsupportedError(f"layer {layer}: {length} keys for {total} tokens with {where}: which tokens they are is not known")


class Wanted(NamedTuple):
    """What one recorder wants of the attention call that runs now.

    Attributes:
        options: of :func:`~hfplug.sinks.sink_scores`.
        written: cuts keys or values ``(batch, kv heads, slots, dim)`` of a static cache to the slots that hold a token.
        take: takes the scores and the values, cut so.
    """

    options: dict[str, Any]
    written: Callable[[Tensor], Tensor]
    take: Callable[[SinkScores, Tensor], None]


def wanted(module: nn.Module) -> list[Wanted]:
    """Who records this attention module in the call that runs now: for implementations that score on their way.

    What a recorder is given so is not scored again by looking on.
    """
    found = []
    for recorder in _ACTIVE:
        call, layer = recorder._scope.current, recorder._modules.get(id(module))
        if call is None or layer not in recorder.layers or recorder not in call.memo:
            continue
        written, take = functools.partial(_written, call, layer), functools.partial(recorder.take, call, layer)
        found.append(Wanted(recorder.what(call), written, take))
    return found


@contextlib.contextmanager
def record(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    counted: Tensor | None = None,
    chunk: int = 256,
    log_diagonal: bool = False,
    value_norms: bool = False,
    prefix: Recording | None = None,
    score: Callable[..., SinkScores] = sink_scores,
) -> Iterator[Recorder]:
    """Record the sink scores of everything the model computes inside the block.

    The model runs with the implementation it has, and its results are those of a run without the block. Every call without a
    past begins a :class:`Recording`; calls with the same cache (``generate``, chunked prefill) go on with it, and the sums are
    those of one pass over the whole text.

    Args:
        model: a causal model whose attention goes through transformers' ``AttentionInterface``.
        layers: indices of the layers, negative ones from the end; ``None``: all.
        counted: ``(batch, tokens)`` bool, the queries whose attention counts, by position; it may be longer than the text.
            ``None``: those of all real tokens.
        chunk: see :func:`~hfplug.sinks.sink_scores`.
        log_diagonal: also the logarithm of what each token gives itself.
        value_norms: also the norm of each token's value.
        prefix: recording of a cached prefix, where the block begins with a cache that was filled outside of it.
        score: computes the scores, with the signature of :func:`~hfplug.sinks.sink_scores`.

    Raises:
        ConfigError: layers the model does not have; ``counted`` that does not fit.
        UnsupportedError: from the model's call, when what was asked for cannot be right: a cache whose tokens were not
            recorded, beam search or assisted decoding, attention whose weights are not known.
    """
    with Recorder(model, layers, counted, chunk, log_diagonal, value_norms, prefix, score) as recorder:
        yield recorder
