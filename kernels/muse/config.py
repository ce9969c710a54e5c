"""Options of MuSe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hfplug import ConfigError
from hfplug.errors import nearest
from hfplug.options import coerce

_BOOKS = Literal["past", "block_leaks_the_future"]
_LEAST = {"clusters": 1, "query_clusters": 1, "block": 1, "retrieve": 0, "iterations": 0, "min_length": 0}
_LAYER = ("clusters", "query_clusters", "block", "retrieve")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class MuSeConfig:
    """Multipole Semantic Attention (arXiv 2509.10406); every number here is our choice, the paper's are not public.

    Defaults are those of a layer on the error-cost frontier measured on the queries and keys of SmolLM2-135M and on synthetic
    topics (benchmarks/muse_speed.py).
    """

    clusters: int = _option(64, "key clusters per span of keys; a cluster of more than twice the mean size is split")
    query_clusters: int = _option(32, "query centroids per span; they cost in making summaries, clusters in using them")
    block: int = _option(1024, "positions per block; a query sees its own block and the one before exactly")
    retrieve: int = _option(0, "tiles of keys per query centroid that are attended key by key, the heaviest first")
    iterations: int = _option(2, "Lloyd steps of k-means, on a sample of 8 vectors per cluster")
    query_codebook: _BOOKS = field(
        default="past",
        metadata={
            "help": "where query centroids come from: older queries (strictly causal), or the block's own, as the paper seems "
            "to, whose outputs then depend on later tokens: for comparison only"
        },
    )
    min_length: int = _option(8192, "tokens of a document from which on MuSe is used; shorter ones get exact attention")
    layers: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "layer index -> what differs there: {exact: true}, {exact_heads: [key heads]}, or clusters, query_clusters, "
            "block, retrieve; calibrate() writes it"
        },
    )

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        if self.query_codebook not in (books := get_args(_BOOKS)):
            close = nearest(self.query_codebook, books)
            raise ConfigError(f"query_codebook={self.query_codebook!r} must be one of {books}{close}")
        self.layers = {str(index): self._layer(index, given) for index, given in self.layers.items()}

    def _layer(self, index: Any, given: Any) -> dict[str, Any]:
        where = f"layers[{index!r}]"
        if isinstance(index, bool) or not str(index).isdecimal():
            raise ConfigError(f"{where}: {index!r} must be the index of a layer, 0 or more")
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}={given!r} must be a mapping")
        hints: dict[str, Any] = {"exact": bool, "exact_heads": list[int], **dict.fromkeys(_LAYER, int)}
        for name, value in given.items():
            if name not in hints:
                raise ConfigError(f"{where}: unknown {name!r}{nearest(str(name), hints)}; known: {sorted(hints)}")
            coerce(value, hints[name], f"{where}.{name}")
            if name in _LAYER and value < _LEAST[name]:
                raise ConfigError(f"{where}.{name}={value} must be {_LEAST[name]} or more")
        heads = given.get("exact_heads", [])
        if len(set(heads)) < len(heads) or any(head < 0 for head in heads):
            raise ConfigError(f"{where}.exact_heads={heads} must name key heads, 0 or more, each once")
        return dict(given)

    def at(self, layer: int | None) -> tuple[MuSeConfig, bool, tuple[int, ...]]:
        """The options of one layer, whether it is exact, and the key heads of it that are."""
        given = self.layers.get(str(layer))
        if given is None:
            return self, False, ()
        numbers = {name: given[name] for name in _LAYER if name in given}
        return replace(self, layers={}, **numbers), bool(given.get("exact")), tuple(given.get("exact_heads", ()))
