"""The patch: which modules are exchanged for which, and the initialisation of a model from scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.families import Decoder, Split, decoder_of
from hfplug.ledger import Ledger
from hfplug.modeling_patches.simplenorm.layer import PartNorm, normed
from hfplug.modelpatch import ModelPatch

ROLES = ("q", "k", "v", "o", "gate", "up", "down")
STD = 0.02  # of q, k, v and the gate; the authors' code


@dataclass(frozen=True)
class SimpleNorm(ModelPatch):
    """Options of SimpleNorm (arXiv 2602.01212; the authors' code where the paper is silent)."""

    method: ClassVar[str] = "simplenorm"

    norm: Literal["rms", "layer"] = field(
        default="rms", metadata={"help": "RMSNorm, or LayerNorm without a shift; over the whole width, before heads and RoPE"}
    )
    eps: float = field(default=1e-5, metadata={"help": "added to the mean square (authors' model arguments: 1e-5)"})
    affine: bool = field(default=True, metadata={"help": "a gain for each output feature, 1 at the start"})
    keep_prenorm: bool = field(
        default=False, metadata={"help": "leave the model's own norms (before attention and MLP, on heads) where they are"}
    )
    targets: tuple[str, ...] = field(
        default=ROLES, metadata={"help": "which projections get a norm; fewer than all only with keep_prenorm"}
    )
    init: Literal["paper", "stock"] = field(
        default="paper",
        metadata={"help": "weights of a model built from its configuration: the authors' (they set lr/||W||), or transformers'"},
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ConfigError(f"eps={self.eps!r} must be a number >= 0")
        if unknown := [t for t in self.targets if t not in ROLES]:
            raise ConfigError(f"targets: unknown {unknown[0]!r}{nearest(unknown[0], ROLES)}; known: {ROLES}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"targets={self.targets!r} must name each of some of {ROLES} once")
        if set(self.targets) != set(ROLES) and not self.keep_prenorm:
            raise ConfigError(f"targets={self.targets!r} leaves projections without any norm; set keep_prenorm=True")

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Exchange projections for normed ones that share their weights, and the norms before them for nothing."""
        decoder = decoder_of(model)
        _check(decoder)
        for index in range(len(decoder.layers)):
            for path, linear, split in decoder.projections(index):
                if not set(split.roles) & set(self.targets):
                    continue
                if not set(split.roles) <= set(self.targets):
                    raise UnsupportedError(
                        f"simplenorm: {path} holds {split.roles} in one matrix; targets={self.targets!r} names only some of them"
                    )
                _check_linear(path, linear)
                norm = PartNorm(split, self.norm, self.eps, self.affine, linear.weight)
                ledger.swap_module(decoder.model, path, normed(linear, norm))
            if not self.keep_prenorm:
                for name in (*decoder.family.norms, *decoder.family.head_norms):
                    ledger.swap_module(decoder.model, f"{decoder.layer_path(index)}.{name}", nn.Identity())

    def init_weights(self, model: Any) -> None:
        """The authors' initialisation, where ``init="paper"``.

        Embeddings N(0, 1); q, k, v and gate truncated normal, std 0.02; o, up beside a gate, and down std
        ``0.02 / sqrt(2 (layer + 1))``; the head std ``d^-1/2`` cut at 3 std; biases 0. An embedding tied to the head gets the
        head's (our reading: N(0, 1) would give logits of size sqrt(d)). Without a gate, up counts as the first map of the MLP.
        """
        if self.init != "paper":
            return
        decoder = decoder_of(model)
        for index in range(len(decoder.layers)):
            for _, linear, split in decoder.projections(index):
                _init_projection(linear, split, index, "gate" in "".join(decoder.family.projections.values()))
        embedding = decoder.stack.get_input_embeddings().weight
        nn.init.normal_(embedding)
        head = model.get_output_embeddings()
        if head is not None:
            std = head.weight.shape[-1] ** -0.5
            nn.init.trunc_normal_(head.weight, std=std, a=-3 * std, b=3 * std)

    def notes(self, decoder: Decoder) -> Sequence[str]:
        """The cost."""
        count = sum(1 for _ in decoder.projections(0))
        return (f"{count} norms in each layer are bound by memory: compile the model, or count on a slower step",)

    def warnings(self, decoder: Decoder) -> Sequence[str]:
        """What it does to a pretrained model."""
        return (
            "every activation of a pretrained model changes; this is a structure to train from scratch, or to retrain "
            "(warm_start() is a start)",
        )


def _check(decoder: Decoder) -> None:
    config = decoder.config
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedError("simplenorm: a decoder with cross-attention (add_cross_attention=True) is not supported")
    if getattr(config, "do_layer_norm_before", True) is False:
        raise UnsupportedError(
            "simplenorm: this OPT (do_layer_norm_before=False) has no norm before its head, so nothing would bound its logits"
        )


def _check_linear(path: str, linear: Any) -> None:
    if type(linear) not in (nn.Linear, Conv1D):
        raise UnsupportedError(
            f"simplenorm: {path} is a {type(linear).__module__}.{type(linear).__name__}; only plain linear maps get a norm (a "
            "quantised or adapted one would be taken apart)"
        )
    if linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"):
        raise UnsupportedError(f"simplenorm: {path} has hooks, which would be lost; apply the patch before adding them")


def _init_projection(linear: Any, split: Split, layer: int, gated: bool) -> None:
    scaled = STD / math.sqrt(2 * (layer + 1))
    stds = [scaled if role in ("o", "down") or (role == "up" and gated) else STD for role in split.roles]
    weight = linear.weight if not isinstance(linear, Conv1D) else linear.weight.T  # rows are outputs
    if split.heads or len(set(stds)) == 1:
        nn.init.trunc_normal_(weight, std=stds[0])
    else:
        for part, std in zip(torch.split(weight, list(split.sizes)), stds, strict=True):
            nn.init.trunc_normal_(part, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


__all__ = ["ROLES", "SimpleNorm"]
