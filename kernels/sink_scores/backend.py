"""``attn_implementation="sink_scores"``: exact attention that scores on its way when something records it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfplug.attention import HANDLES, AttentionCall
from hfplug.errors import UnsupportedError
from hfplug.kernels.sink_scores.op import sink_scores
from hfplug.recording import wanted
from hfplug.seams.attention import options_of
from hfplug.sinks import attend_and_score


class SinkScoresAttention:
    """Exact attention through sdpa; inside ``record(model)`` one pass gives output and scores where it can."""

    handles = frozenset(HANDLES)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Output ``(batch, queries, heads, dim_v)``; weights only where asked for.

        Raises:
            UnsupportedError: a recorded call has a position bias.
        """
        takers = [] if call.module is None or torch.compiler.is_compiling() else wanted(call.module)
        if not takers:
            return call.exact()
        if call.position_bias is not None:
            raise UnsupportedError("attention with a position bias is not measured")
        key, value = (takers[0].written(states) for states in (call.key, call.value))
        mask, documents = call.mask, None
        if mask is not None:
            mask = mask[..., : key.shape[2]]
        elif call.segments is not None:
            mask, documents = call.segments > 0, call.segments
        found: dict[str, Any] = {
            "mask": mask, "documents": documents, "causal": call.causal, "scaling": call.scaling, "softcap": call.softcap,
            "sinks": call.s_aux, "window": call.window if call.mask is None else None,
        }  # fmt: skip
        if len(takers) == 1 and self._fused(call):
            out, scored = attend_and_score(call.query, key, value, **found, **takers[0].options)
            takers[0].take(scored, value)
            return out.transpose(1, 2).contiguous(), None
        out, weights = call.exact()
        with torch.no_grad():
            for taker in takers:
                taker.take(sink_scores(call.query, key, **found, **taker.options), value)
        return out, weights

    def _fused(self, call: AttentionCall) -> bool:
        graded = torch.is_grad_enabled() and any(t.requires_grad for t in (call.query, call.key, call.value))
        plain = call.query.device.type == "cpu" and not call.dropout and not call.output_attentions
        return plain and not graded and bool(options_of(call.config, "sink_scores").fused)
