"""Options of MuSe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hfplug import ConfigError
from hfplug.errors import nearest
from hfplug.options import coerce

_BOOKS = Literal["past", "block_leaks_the_future"]
_LEAST = {"clusters": 1, "query_clusters": 1, "block": 1, "retrieve": 0, "iterations": 0, "min_length": 0}
LAYER_OPTIONS = ("clusters", "query_clusters", "block", "retrieve")


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
            value = coerce(getattr(self, name), int, name)
            if value < least:
                raise ConfigError(f"{name}={value} must be {least} or more")
        books = get_args(_BOOKS)
        if self.query_codebook not in books:
            close = nearest(str(self.query_codebook), books)
            raise ConfigError(f"query_codebook={self.query_codebook!r} must be one of {books}{close}")
        layers: dict[str, Any] = {}
        for given, options in _mapping(self.layers, "layers").items():
            index = _index(given)
            if index in layers:
                raise ConfigError(f"layers has layer {index} twice")
            layers[index] = self._layer(index, options)
        self.layers = layers

    def _layer(self, index: str, given: Any) -> dict[str, Any]:
        where = f"layers[{index!r}]"
        hints: dict[str, Any] = {"exact": bool, "exact_heads": list[int], **dict.fromkeys(LAYER_OPTIONS, int)}
        for name, value in _mapping(given, where).items():
            if name not in hints:
                raise ConfigError(f"{where}: unknown {name!r}{nearest(str(name), hints)}; known: {sorted(hints)}")
            coerce(value, hints[name], f"{where}.{name}")
            if name in LAYER_OPTIONS and value < _LEAST[name]:
                raise ConfigError(f"{where}.{name}={value} must be {_LEAST[name]} or more")
        heads = given.get("exact_heads", [])
        if len(set(heads)) < len(heads) or any(head < 0 for head in heads):
            raise ConfigError(f"{where}.exact_heads={heads} must name key heads, 0 or more, each once")
        return dict(given)

    def check_layers(self, modules: Sequence[Any]) -> None:
        """Raise unless every layer and key head that is named in ``layers`` is there.

        Args:
            modules: the attention layers these options are for, with ``layer_idx`` and ``config``.
        """
        present = {str(m.layer_idx): m for m in modules if getattr(m, "layer_idx", None) is not None}
        for index, given in self.layers.items():
            if index not in present:
                known = f"0 to {len(present) - 1}" if all(str(i) in present for i in range(len(present))) else sorted(present)
                raise ConfigError(f"layers: there is no layer {index}; this model has {known}")
            config = present[index].config
            count = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
            heads = given.get("exact_heads", [])
            if count is not None and any(head >= count for head in heads):
                raise ConfigError(f"layers[{index!r}].exact_heads={heads}: the layer has {count} key heads")

    def at(self, layer: int | None) -> tuple[MuSeConfig, bool, tuple[int, ...]]:
        """The options of one layer, whether it is exact, and the key heads of it that are."""
        given = self.layers.get(str(layer))
        if given is None:
            return self, False, ()
        numbers = {name: given[name] for name in LAYER_OPTIONS if name in given}
        return replace(self, layers={}, **numbers), bool(given.get("exact")), tuple(given.get("exact_heads", ()))


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r} must be a mapping")
    return value


def _index(given: Any) -> str:
    text = str(given)
    if isinstance(given, bool) or not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"layers[{given!r}]: {given!r} must be the index of a layer, 0 or more")
    return str(int(text))
