"""Options of TurboConn, and what it puts into a model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from hfplug.calls import CallScope, call_scope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import Decoder, decoder_of
from hfplug.ledger import Ledger
from hfplug.modeling_patches.turboconn.connections import Connections
from hfplug.modeling_patches.turboconn.driver import Driver
from hfplug.modelpatch import ModelPatch

Mode = Literal["exact", "jacobi"]
SHARE = 0.1  # of the model's parameters: what is added beyond is said aloud


@dataclass(frozen=True)
class TurboConn(ModelPatch):
    """Turbo connections (arXiv 2602.17993): ``h_l^i = Block_l(h_{l-1}^i) + gain * sum_s D_{s->l}(h_s^{i-g})``, ``s > l``.

    ``i`` is the position of a token, ``g`` the group size, ``h_s`` the output of layer ``s`` with its own feedback, ``D`` a
    linear map that starts at 0. The equation is the paper's; the pairs, the start of ``D``, the defaults, the rank, the
    normalisation and the passes are our reading.

    Raises:
        ConfigError: an option out of its range.
    """

    method: ClassVar[str] = "turboconn"
    identity: ClassVar[bool] = True

    pairs: Literal["shift", "dense", "sparse"] | tuple[tuple[int, int], ...] = field(
        default="shift",
        metadata={
            "help": 'connections: "shift": layer l + ceil(L/2) to layer l, for the lower half; "dense": every layer of the upper '
            'half to every one of the lower; "sparse": the last to the first alone; or a list of (source, target)'
        },
    )
    group_size: int = field(
        default=1,
        metadata={"help": "g: how many tokens back the states come from, and how many are computed at a time"},
    )
    gain: float = field(
        default=1.0,
        metadata={"help": "factor of the feedback; fixed"},
    )
    rank: int | None = field(
        default=None,
        metadata={"help": "rank of every projection; null: full, d x d"},
    )
    normalize: bool = field(
        default=False,
        metadata={"help": "divide states by their root mean square before the projection"},
    )
    training: Mode = field(
        default="exact",
        metadata={
            "help": '"exact": group after group; "jacobi": full passes over the sequence, each with the states of the one before'
        },
    )
    prefill: Mode = field(
        default="exact",
        metadata={"help": "the same for whatever runs without training, prompts above all"},
    )
    passes: int | None = field(
        default=None,
        metadata={"help": 'passes of "jacobi"; null: ceil(tokens / group_size), which is exact'},
    )
    backward_passes: int | None = field(
        default=None,
        metadata={"help": 'the last passes of "jacobi" that gradients go through; null: all'},
    )

    def __post_init__(self) -> None:
        for name in ("group_size", "rank", "passes", "backward_passes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r} must be at least 1")
        if not 0 < abs(self.gain) < float("inf"):
            raise ConfigError(f"gain={self.gain!r} must be a finite number other than 0")
        if self.passes is not None and "jacobi" not in (self.training, self.prefill):
            raise ConfigError(f"passes={self.passes!r} needs training='jacobi' or prefill='jacobi'; exact counts its own")
        if self.backward_passes is not None and self.training != "jacobi":
            raise ConfigError(f"backward_passes={self.backward_passes!r} needs training='jacobi', not {self.training!r}")
        if not isinstance(self.pairs, str):
            if not self.pairs:
                raise ConfigError("pairs=() must hold at least one (source, target)")
            for source, target in self.pairs:
                if not source > target >= 0:
                    raise ConfigError(f"pairs: ({source}, {target}) must go down: source > target >= 0")
            if len(set(self.pairs)) < len(self.pairs):
                raise ConfigError(f"pairs={self.pairs!r} holds a pair twice")

    def connections(self, depth: int) -> dict[int, tuple[int, ...]]:
        """Target layer -> its source layers, in a model of ``depth`` layers.

        Raises:
            UnsupportedError: fewer layers than the pairs need.
        """
        half = (depth + 1) // 2
        if self.pairs == "shift":
            pairs = [(target + half, target) for target in range(depth // 2)]
        elif self.pairs == "dense":
            pairs = [(source, target) for target in range(depth // 2) for source in range(half, depth)]
        elif self.pairs == "sparse":
            pairs = [(depth - 1, 0)] if depth > 1 else []
        else:
            pairs = list(self.pairs)
        if not pairs or max(source for source, _ in pairs) >= depth:
            raise UnsupportedError(f"turboconn: pairs={self.pairs!r} do not fit into a model of {depth} layers")
        return {target: tuple(s for s, t in pairs if t == target) for target in sorted({t for _, t in pairs})}

    def layers(self, decoder: Decoder) -> Iterable[int]:
        """Sources and targets."""
        found = self.connections(len(decoder.layers))
        return set(found) | {s for sources in found.values() for s in sources}

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Add the projections, listen to the layers, and run the stack through :class:`Driver`.

        Raises:
            UnsupportedError: cross-attention, or code in the layers that needs all tokens of a forward at once (retoken, mort).
        """
        decoder = decoder_of(model)
        if getattr(decoder.config, "add_cross_attention", False):
            raise UnsupportedError("turboconn: cross-attention (add_cross_attention=True) has no place in its passes")
        found = self.connections(len(decoder.layers))
        scope = call_scope(decoder.model)
        ledger.run(functools.partial(scope.cut, self.method), functools.partial(_leave, scope))
        driver = Driver(self, decoder.stack, decoder.family.layers, found, vars(decoder.stack).get("forward"))
        for target, sources in found.items():
            layer = decoder.layers[target]
            like = next(p for p in layer.parameters() if p.is_floating_point())
            added = Connections(
                sources, int(decoder.config.hidden_size), rank=self.rank, gain=self.gain, normalize=self.normalize,
                device=like.device, dtype=like.dtype,
            )  # fmt: skip
            ledger.add_module(layer, "turboconn", added.train(layer.training))
        for index in self.layers(decoder):
            # First of all hooks: hidden states that others record hold the feedback, and FSDP has not yet put the weights away.
            ledger.hook(decoder.layers[index], "forward", functools.partial(driver.after_layer, index), prepend=True)
        ledger.set_attr(decoder.stack, "forward", driver.forward)

    def _cost(self, decoder: Decoder) -> tuple[int, int, int]:
        found = self.connections(len(decoder.layers))
        count, width = sum(map(len, found.values())), int(decoder.config.hidden_size)
        return count, count * (width * width if self.rank is None else 2 * self.rank * width), width

    def notes(self, decoder: Decoder) -> Sequence[str]:
        """What it costs."""
        count, weights, width = self._cost(decoder)
        sources = len({s for each in self.connections(len(decoder.layers)).values() for s in each})
        kept = sources * width * self.group_size
        passes = {self.training, self.prefill}
        return [
            f"{count} connections; every token costs {weights:,} multiplications more",
            f"training and prefill: ceil(tokens / {self.group_size}) forwards one after the other"
            + (f", in mode jacobi {self.passes or 'as many'} passes over all tokens" if "jacobi" in passes else ""),
            f"decoding: a state of {kept:,} numbers per row beside the KV cache, 64 tokens more for rollback",
        ]

    def warnings(self, decoder: Decoder) -> Sequence[str]:
        """Whether it adds a large part of the model."""
        count, weights, _ = self._cost(decoder)
        whole = sum(p.numel() for p in decoder.model.parameters()) - weights
        if weights <= SHARE * whole:
            return []
        return [f"{count} connections add {weights:,} parameters, {weights / whole:.0%} of the model's; rank= makes them smaller"]


def _leave(scope: CallScope, cut: None) -> None:
    scope.leave(TurboConn.method)


__all__ = ["TurboConn"]
