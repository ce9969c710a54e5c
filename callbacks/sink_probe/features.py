"""What a probe looks at: SinkProbe's features and those of earlier detectors, from one recording of attention scores."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hfplug import ConfigError, HfplugError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from hfplug.recording import Recording

# name: what it is. The first three are the k largest values of every layer and head, the next one value of every layer and
# head, the others single numbers.
FEATURES = {
    "sink": "SinkProbe: mean attention a token receives, the k largest, positions dropped (2604.10697, Eq. 1)",
    "lap_eig": "LapEigvals: eigenvalues s_i - a_ii of the attention Laplacian, the k largest (2502.17598)",
    "attn_eig": "AttnEigvals: eigenvalues a_ii of the attention map, the k largest (2502.17598)",
    "log_det": "LLM-Check's attention score: mean of log a_ii (here kept by layer and head)",
    "bos_mass": "mean attention the first token receives, over all layers and heads",
    "nll": "mean negative log-likelihood of the answer's tokens",
    "perplexity": "exp of nll",
    "prompt_length": "tokens of the prompt",
    "answer_length": "tokens of the answer",
}
TOP_K = ("sink", "lap_eig", "attn_eig")
FROM_TEXT = ("nll", "perplexity", "prompt_length", "answer_length")
SINGLE = ("bos_mass", *FROM_TEXT)
SPANS = ("all", "answer")
VALUE_NORMS = ("none", "mul")


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the columns of a feature table are, and of which model: a probe works on the same alone.

    Attributes:
        feature: one of :data:`FEATURES`.
        model: name of the model; ``shape``: its type and sizes.
        prompt: how prompts were put to it: ``"plain"``, or ``"chat:"`` with a hash of the template.
        layers: indices of the layers; ``heads``: query heads of each. Empty and 0 where they do not matter, as are the others.
        k: values per layer and head.
        min_queries, include_self, span, value_norm: see :class:`~hfplug.callbacks.sink_probe.probe.SinkProbe`.
    """

    feature: str
    model: str = ""
    shape: str = ""
    prompt: str = "plain"
    layers: tuple[int, ...] = ()
    heads: int = 0
    k: int = 0
    min_queries: int = 1
    include_self: bool = True
    span: str = "all"
    value_norm: str = "none"

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(np.prod(self.shape_by_head))

    @property
    def shape_by_head(self) -> tuple[int, int, int]:
        """Layers, heads and values of each; of a single number 1, 1, 1."""
        return (1, 1, 1) if self.feature in SINGLE else (len(self.layers), self.heads, max(1, self.k))

    def check(self, other: Layout) -> None:
        """Refuse features that are not of this layout.

        Raises:
            UnsupportedError: names what differs.
        """
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        if different := [name for name in mine if mine[name] != theirs[name]]:
            told = "; ".join(f"{name}: fitted on {mine[name]!r}, given {theirs[name]!r}" for name in different)
            raise UnsupportedError(f"these features are not the ones the probe was fitted on: {told}")


@dataclasses.dataclass(frozen=True)
class FeatureTable:
    """Features of some answers.

    Attributes:
        values: ``(answers, width)`` float64.
        layout: what the columns are.
    """

    values: np.ndarray
    layout: Layout

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != self.layout.width:
            raise ConfigError(f"values {self.values.shape} must be (answers, {self.layout.width}), as the layout says")

    def __len__(self) -> int:
        return len(self.values)

    def by_head(self) -> np.ndarray:
        """``(answers, layers, heads, k)``; for single numbers ``(answers, 1, 1, 1)``."""
        return self.values.reshape(len(self), *self.layout.shape_by_head)


def top_k(values: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` largest valid values along the last dimension, descending; 0 where there are fewer.

    Args:
        values: ``(..., tokens)``.
        valid: bool, broadcastable to it.
        k: 1 or more.

    Returns:
        ``(..., k)``.

    Raises:
        HfplugError: a valid value is NaN or infinite: its order means nothing.
    """
    import torch

    valid = valid.expand_as(values)
    if not bool(values[valid].isfinite().all()):
        raise HfplugError("attention scores that are NaN or infinite: the model's activations overflow")
    kept = values.masked_fill(~valid, float("-inf")).topk(min(k, values.shape[-1]), dim=-1).values
    kept = kept.masked_fill(kept == float("-inf"), 0.0)
    return torch.nn.functional.pad(kept, (0, k - kept.shape[-1]))


def attention_features(recording: Recording, layout: Layout) -> np.ndarray:
    """``(batch, width)`` float64 of a feature that is made of attention.

    Args:
        recording: of whole texts, over the queries of ``layout.span``; with logarithms for ``log_det``, with norms of the values
            for ``value_norm="mul"``.
        layout: which feature.
    """
    import torch

    found = [_of_layer(recording, layer, layout) for layer in layout.layers]
    stacked = torch.stack(found, dim=1).double().cpu()
    if layout.feature == "bos_mass":
        stacked = stacked.mean(dim=(1, 2))[:, None]
    return stacked.flatten(1).numpy()


def _of_layer(recording: Recording, layer: int, layout: Layout) -> torch.Tensor:
    import torch

    scored = recording.per_layer[layer]
    own, real = scored.own[:, None].bool(), scored.real[:, None]
    if layout.feature == "log_det":
        assert scored.log_diagonal is not None
        return (scored.log_diagonal * own).sum(dim=-1) / own.sum(dim=-1).clamp(min=1)
    if layout.feature == "attn_eig":
        return top_k(scored.diagonal, own, layout.k)
    if layout.feature == "bos_mass":
        first = scored.real.float().argmax(dim=1)
        return scored.scores().gather(2, first[:, None, None].expand(-1, scored.sums.shape[1], 1))[..., 0]
    include_self = layout.include_self or layout.feature == "lap_eig"
    values = scored.scores(include_self)
    valid = real & (scored.count(include_self) >= max(1, layout.min_queries))
    if layout.feature == "lap_eig":
        values = values - scored.diagonal
    elif layout.value_norm == "mul":
        norms = recording.value_norms[layer]
        values = values * torch.repeat_interleave(norms, values.shape[1] // norms.shape[1], dim=1)
    return top_k(values, valid, layout.k)
