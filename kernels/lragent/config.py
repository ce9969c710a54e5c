"""Options of the shared cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hfplug.errors import ConfigError
from hfplug.options import Checked


@dataclass(frozen=True)
class LRAgentConfig(Checked):
    """What the agents of a :class:`~hfplug.kernels.lragent.cache.LowRankValueCache` share."""

    agents: tuple[str, ...] | None = field(
        default=None, metadata={"help": "names of the adapters that will read one text; null: all LoRA adapters of the model"}
    )
    mode: Literal["exact", "base", "base_lr", "full"] = field(
        default="exact",
        metadata={
            "help": "exact: only what is equal for all agents (layers up to the first adapted one); base (BaseShared): keys and "
            "base values; base_lr (BaseLRShared): also the low-rank part, which needs equal A; full (FullShared): everything. "
            "All but exact are approximations"
        },
    )
    keys: Literal["shared", "own"] | None = field(
        default=None,
        metadata={"help": "keys of layers whose key projection is adapted, in mode base; must be chosen where there are any"},
    )

    def __post_init__(self) -> None:
        if self.agents is not None:
            self.require(("agents", len(self.agents) > 0, "names of adapters"))
            twice = sorted({a for a in self.agents if self.agents.count(a) > 1})
            if twice:
                raise ConfigError(f"agents={list(self.agents)!r} names {twice[0]!r} twice")
        self.require(("keys", self.keys != "own" or self.mode in ("exact", "base"), f'"shared" in mode {self.mode!r}: no agent '
                      "reads the text again, so none has keys of its own"))  # fmt: skip


@dataclass(frozen=True)
class LoraLowrankConfig:
    """The attention implementation has no options."""


__all__ = ["LRAgentConfig", "LoraLowrankConfig"]
