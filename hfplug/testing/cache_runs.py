"""Caches, layers and random states that the contract of cache methods is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hfplug.testing.models import tiny_gemma3, tiny_llama, tiny_qwen3
from hfplug.testing.runs import Runs, off

if TYPE_CHECKING:
    from torch import Tensor

HEADS, DIM = 2, 8
FAMILIES = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}


class CacheRuns(Runs):
    """What :class:`~hfplug.testing.cache.CacheContract` runs; its attributes are described there."""

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    window: ClassVar[int | None] = None
    long: ClassVar[int] = 70
    rows_independent: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5

    # -- what the tests run -------------------------------------------------------------------------------------------------

    def cache(self, model: Any, **options: Any) -> Any:
        """An empty cache for a model."""
        from hfplug.seams.cache import make

        return make(self.method, model, **{**self.options, **options})

    def model(self, family: str = "llama") -> Any:
        """A tiny model in evaluation mode."""
        return FAMILIES[family](max_position_embeddings=4 * self.long).eval()

    def layer(self, **options: Any) -> tuple[Any, Any]:
        """``(cache, its first own layer)`` with nothing stored."""
        cache = self.cache(tiny_llama().config, **options)
        return cache, cache.own_layers[0]

    def states(self, rows: int = 3, tokens: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random keys and values ``(rows, heads, tokens, dim)``; one channel of the keys is far larger than the rest."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        keys, values = torch.randn(2, rows, HEADS, tokens or self.long, DIM, generator=generator).unbind()
        keys[..., 1] *= 50
        return keys, values

    def fill(self, keys: Tensor, values: Tensor, *, chunk: int | None = None, mask: Tensor | None = None, **options: Any) -> Any:
        """A layer fed with these, in one chunk or several."""
        cache, layer = self.layer(**options)
        if mask is not None:
            cache.padding(mask)
        chunk = chunk or keys.shape[2]
        for begin in range(0, keys.shape[2], chunk):
            part = slice(begin, begin + chunk)
            layer.update(keys[:, :, part], values[:, :, part])
        return layer

    def unchanged(self, layer: Any, before: Mapping[str, Tensor], length: int) -> None:
        """Everything stored is what it was."""
        import torch

        assert layer.length == length
        assert layer.state.keys() == before.keys()
        assert all(torch.equal(layer.state[n], before[n]) for n in before)


__all__ = ["DIM", "FAMILIES", "HEADS", "CacheRuns", "off"]
