"""The definition, written as plainly as possible: one token after the other, everything computed anew for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def turboconn_reference(
    model: Any, ids: Tensor, weights: Mapping[tuple[int, int], Tensor], group_size: int, gain: float
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits of a stock Llama-like model with turbo connections.

    For every token, all layers run over all tokens up to it; the states that come back are those found for earlier tokens.
    No cache, no hooks, no groups.

    Args:
        model: a stock ``LlamaForCausalLM`` or the like, without padding.
        ids: ``(batch, tokens)``.
        weights: ``(source, target) -> D`` of shape ``(d, d)``.
        group_size: tokens between a state and where it goes.
        gain: factor.

    Returns:
        Logits ``(batch, tokens, vocabulary)``, and the states ``(batch, tokens, d)`` of each source.
    """
    stack, (rows, length) = model.model, ids.shape
    embedded = stack.embed_tokens(ids)
    states = {s: torch.zeros_like(embedded) for s, _ in weights}
    last = torch.zeros_like(embedded)
    for now in range(length):
        hidden = embedded[:, : now + 1]
        positions = torch.arange(now + 1)[None].expand(rows, -1)
        rotation = stack.rotary_emb(hidden, position_ids=positions)
        hidden_later = torch.full((now + 1, now + 1), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        for index, layer in enumerate(stack.layers):
            hidden = layer(hidden, attention_mask=hidden_later, position_embeddings=rotation, position_ids=positions)
            for (source, target), weight in weights.items():
                if target == index:
                    hidden = hidden.clone()
                    for token in range(group_size, now + 1):
                        hidden[:, token] += gain * states[source][:, token - group_size] @ weight.T
            if index in states:
                states[index][:, now] = hidden[:, now]
        last[:, now] = hidden[:, now]
    return model.lm_head(stack.norm(last)), states


__all__ = ["turboconn_reference"]
