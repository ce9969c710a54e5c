"""Tiny models and the fp64 reference for the contract of attention methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfplug.testing import models

if TYPE_CHECKING:
    from torch import Tensor

    from hfplug.attention import AttentionCall

_LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# Wide weights: with transformers' 0.02 the scores of a random model are next to 0, and neither caps nor sinks would show.
_BASE = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, **models._SHARED}


def tiny_gemma2(attn: str = "eager", **options: Any) -> Any:
    """A ``Gemma2ForCausalLM``: scores capped at 2, a layer with a window of 4 tokens, then one with full attention."""
    base = {**_BASE, **_LAYERS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
    return models._build("Gemma2ForCausalLM", "Gemma2Config", 0, attn, {**base, **options})


def tiny_gpt_oss(attn: str = "eager", **options: Any) -> Any:
    """A ``GptOssForCausalLM``: learned sinks that take a good part of the weight, a window of 4 in the first layer, 2 experts."""
    import torch

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    base = {**_BASE, **_LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": rope}
    model = models._build("GptOssForCausalLM", "GptOssConfig", 0, attn, {**base, **options})
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.sinks.copy_(torch.linspace(-1, 2, len(layer.self_attn.sinks)) + index)
    return model


IMAGE = 63
"""The token that stands for one of the four patches of an image of :func:`tiny_llava`."""


def tiny_llava(attn: str | dict[str, str]) -> Any:
    """A ``LlavaForConditionalGeneration``: a CLIP tower for images of 8 by 8 (four patches) on a Llama."""
    import torch
    import transformers

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
        "patch_size": 4, "projection_dim": 32,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_BASE), vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=IMAGE, image_seq_length=4, vision_feature_select_strategy="default", vision_feature_layer=-1,
        attn_implementation=attn,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlavaForConditionalGeneration(config).float().eval()


# family -> (builder, the stock attention to compare with, what a method has to handle for it)
FAMILIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "llama": (models.tiny_llama, "sdpa", ()),
    "qwen3": (models.tiny_qwen3, "sdpa", ()),
    "gpt2": (models.tiny_gpt2, "sdpa", ()),
    "gemma3": (models.tiny_gemma3, "sdpa", ("sliding_window", "dense_mask")),
    "gemma2": (tiny_gemma2, "eager", ("softcap", "sliding_window", "dense_mask")),
    "gpt_oss": (tiny_gpt_oss, "eager", ("s_aux", "sliding_window", "dense_mask")),
}

# Models that make their mask without looking at the positions: packed documents see each other under every stock attention.
NO_PACKING = ("gpt_oss",)


def visible(call: AttentionCall) -> Tensor:
    """``(batch or 1, heads or 1, queries, keys)`` bool: what each query sees, from the definition, position by position."""
    import torch

    if call.mask is not None:
        return call.mask if call.mask.dtype == torch.bool else call.mask > torch.finfo(call.mask.dtype).min / 2
    batch, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    seen = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for q in range(queries):
            at = keys - queries + q
            for k in range(at + 1 if call.causal else keys):
                seen[b, 0, q, k] = call.segments is None or bool(
                    call.segments[b, k] == call.segments[b, at] and call.segments[b, at] > 0
                )
    return seen


def reference(call: AttentionCall) -> Tensor:
    """Exact attention of a call in fp64, ``(batch, queries, heads, dim_v)``; zeros where a query sees nothing."""
    import torch

    heads, groups = call.query.shape[1], call.query.shape[1] // call.key.shape[1]
    seen = visible(call).expand(call.query.shape[0], heads, -1, -1)
    out = torch.zeros(*call.query.shape[:3], call.value.shape[3], dtype=torch.float64)
    for h in range(heads):
        query, key, value = call.query[:, h].double(), call.key[:, h // groups].double(), call.value[:, h // groups].double()
        score = query @ key.transpose(1, 2) * call.scaling
        if call.softcap is not None:
            score = call.softcap * torch.tanh(score / call.softcap)
        for added in (call.position_bias, call.mask if call.mask is not None and call.mask.is_floating_point() else None):
            if added is not None:
                score = score + added.expand(-1, heads, -1, -1)[:, h].double()
        weight = torch.exp(score - score.amax(-1, keepdim=True)) * seen[:, h]
        total = weight.sum(-1, keepdim=True)
        if call.s_aux is not None:
            total = total + torch.exp(call.s_aux[h].double() - score.amax(-1, keepdim=True))
        out[:, h] = weight / torch.where(total > 0, total, 1.0) @ value  # divided by 1 where nothing is seen: 0, gradients too
    return out.transpose(1, 2)


def real_queries(call: AttentionCall) -> Tensor:
    """``(batch, queries)`` bool: the rows whose result means something."""
    seen = visible(call).expand(call.query.shape[0], -1, -1, -1)
    return seen.any(dim=3).any(dim=1)
