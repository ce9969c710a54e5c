"""``attn_implementation="lora_lowrank"``: exact attention that keeps the low-rank part of a shared cache's values low."""

from __future__ import annotations

from torch import Tensor

from hfplug.attention import HANDLES, AttentionCall
from hfplug.kernels.lragent.cache import LOW
from hfplug.kernels.lragent.op import flash_lora_attention
from hfplug.kernels.lragent.split import SCOPE


class LoraLowrankAttention:
    """Exact attention through sdpa; Flash-LoRA-Attention where the call's cache is a view of a ``LowRankValueCache``."""

    handles = frozenset(HANDLES)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Output ``(batch, queries, heads, dim_v)``; weights only where asked for."""
        scope, index = vars(call.module).get(SCOPE, (None, 0)) if call.module is not None else (None, 0)
        running = None if scope is None else scope.current
        parts = None if running is None else running.memo.pop((*LOW, index), None)
        if parts is None:
            return call.exact()
        return flash_lora_attention(call, *parts)


__all__ = ["LoraLowrankAttention"]
