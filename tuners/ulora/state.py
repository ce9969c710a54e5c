"""What U-LoRA carries between calls: context sums beside a KV cache, and the utilisation statistics of a training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.cache_utils import DummyLayer

from hfplug.calls import Call, CallScope
from hfplug.errors import UnsupportedError
from hfplug.optimization import watch_optimizer_steps

Sums = tuple[torch.Tensor, torch.Tensor]


class ContextLayer(DummyLayer):
    """Context sums kept as a layer of the KV cache, so that every batch operation of the cache reaches them.

    Beam search reorders it, ``batch_repeat_interleave`` expands it, ``copy.deepcopy`` of a cache (two questions on one
    prefix) copies it, ``reset`` empties it; no bookkeeping of our own can fall out of step.

    Args:
        is_sliding: as the first layer of the cache, so that a search for a (non-)sliding layer never stops here.
        is_compileable: as the cache's other layers, or transformers would leave out the mask of a static cache.
    """

    is_croppable = False

    def __init__(self, is_sliding: bool, is_compileable: bool) -> None:
        super().__init__()
        self.is_sliding, self.is_compileable = is_sliding, is_compileable
        self.sums: dict[Any, Sums] = {}
        self.length = 0

    def _each(self, change: Any) -> None:
        self.sums = {key: (change(total), change(count)) for key, (total, count) in self.sums.items()}

    def reset(self) -> None:
        self.sums, self.length = {}, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda t: t[indices.to(t.device) if hasattr(indices, "to") else indices])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedError(
                "ulora: the cache was cropped (assisted or speculative decoding), but the running context of removed tokens "
                "cannot be taken back; use plain decoding, or start from a new cache"
            )


class ModelState:
    """One per model, shared by its U-LoRA layers: the calls it follows and the step's statistics."""

    def __init__(self, scope: CallScope) -> None:
        self.scope = scope
        self.layers: list[Any] = []
        scope.join("ulora", self.commit)
        watch_optimizer_steps(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a deepcopy must be called back after optimizer steps too
        watch_optimizer_steps(self)

    def close(self) -> None:
        """Stop following calls; the model is unloaded."""
        self.scope.leave("ulora")
        self.layers.clear()

    # -- context beside the cache ---------------------------------------------------------------------------------------

    def past(self, call: Call, key: Any) -> Sums | None:
        """Sums of the tokens this call's cache holds, for the layer and adapter ``key``.

        Raises:
            UnsupportedError: the cache holds tokens that this adapter has not seen.
        """
        if call.cache is None or call.past == 0:
            return None
        layer = _context_layer(call.cache)
        if layer is None or layer.length != call.past or key not in layer.sums:
            seen = 0 if layer is None or key not in layer.sums else layer.length
            raise UnsupportedError(
                f"ulora: the cache holds {call.past} tokens but the running context of this adapter covers {seen}; it was "
                "filled with the adapter off, by another adapter, or was cropped. Fill a new cache with the adapter active"
            )
        return layer.sums[key]

    def commit(self, call: Call) -> None:
        """After a forward without errors: keep its sums beside the cache it used or returned."""
        new = call.memo.get("ulora")
        if not new or call.cache is None:
            return
        if not hasattr(call.cache, "layers"):
            kind = type(call.cache).__name__
            raise UnsupportedError(f"ulora: {kind} is not a transformers Cache with layers; cannot decode with it")
        layer = _context_layer(call.cache)
        if layer is None or call.past == 0:
            if layer is None:
                others = call.cache.layers  # not handed over: Dynamo rebuilds the layer from constants only
                sliding = bool(others and getattr(others[0], "is_sliding", False))
                layer = ContextLayer(sliding, all(other.is_compileable for other in others))
                call.cache.layers.append(layer)
            layer.reset()
        layer.sums = new  # whole: an adapter that sat this call out must not be found again with sums that are too short
        layer.length = call.past + call.length

    # -- statistics of a training step ------------------------------------------------------------------------------------

    def after_optimizer_step(self, ids: set[int]) -> None:
        """Fold the utilisation seen since the last step into the prior of every adapter this optimizer trains."""
        stepped = [
            (layer, name)
            for layer in self.layers
            for name in layer.ulora_pending
            if name in layer.ulora_gate and id(layer.ulora_gate[name].bias) in ids
        ]
        if stepped:
            self.fold(stepped)

    def fold(self, stepped: list[tuple[Any, str]]) -> None:
        """Mean utilisation over all micro-batches and ranks, into the prior: ``m += w·(mean - m)``."""
        pending = [layer.ulora_pending.pop(name) for layer, name in stepped]
        flat = torch.cat([torch.cat([total.float(), count.float().reshape(1)]) for total, count in pending])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        sizes = [total.numel() + 1 for total, _ in pending]
        for (layer, name), part in zip(stepped, flat.split(sizes), strict=True):
            layer.fold_ema(name, part[:-1] / part[-1].clamp(min=1))


def _context_layer(cache: Any) -> ContextLayer | None:
    layers = getattr(cache, "layers", ())
    return next((layer for layer in reversed(layers) if isinstance(layer, ContextLayer)), None)
