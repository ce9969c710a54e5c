"""A tiny model of every family that patches know, built from configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from hfplug.testing import models
from hfplug.testing.attention_models import tiny_gemma2, tiny_llava

_Test = TypeVar("_Test", bound=Callable[..., Any])
_OVER = "_hfplug_families"

# Wide weights: with transformers' 0.02 the layers of a random model do next to nothing, and no fault would show.
_WIDE = {**models._SHARED, "initializer_range": 0.2}
_GROUPED = {**_WIDE, "intermediate_size": 48, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def _of(model: str, config: str, base: dict[str, Any]) -> Callable[..., Any]:
    def build(seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
        return models._build(model, config, seed, attn, {**base, **options}).eval()

    return build


def _with(build: Callable[..., Any], base: dict[str, Any]) -> Callable[..., Any]:
    def built(**options: Any) -> Any:
        return build(**{**base, **options}).eval()

    return built


_NEOX = {**_WIDE, "intermediate_size": 48, "attention_dropout": 0.0, "hidden_dropout": 0.0}
_OPT = {**_WIDE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.2}
_VL2 = {"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}, **_TOKENS}
_VL25 = {"vision_config": {**_VISION, "fullatt_block_indexes": [0]}, **_TOKENS}
_VL3 = {"vision_config": {**_VISION, "deepstack_visual_indexes": [0]}, **_TOKENS}
_TEXT = {**_GROUPED, "rope_parameters": _ROPE}

FAMILIES: dict[str, Callable[..., Any]] = {
    "Llama": _with(models.tiny_llama, {"initializer_range": 0.2}),
    "Mistral": _of("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": None}),
    "Qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "Qwen3": _with(models.tiny_qwen3, {"initializer_range": 0.2}),
    "Gemma2": tiny_gemma2,
    "Gemma3": _with(models.tiny_gemma3, {"initializer_range": 0.2}),
    "GPT-NeoX": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    "GPT-2": _with(models.tiny_gpt2, {"initializer_range": 0.2}),
    "OPT": _of("OPTForCausalLM", "OPTConfig", _OPT),
    "Phi-3": _of("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "resid_pdrop": 0.0}),
    "Qwen2-VL": _of("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", {"text_config": _TEXT, **_VL2}),
    "Qwen2.5-VL": _of("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", {"text_config": _TEXT, **_VL25}),
    "Qwen3-VL": _of("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", {"text_config": {**_TEXT, "head_dim": 8}, **_VL3}),
    "LLaVA": lambda **options: tiny_llava(options.get("attn", "sdpa")),
}

# Models that make their mask without looking at the positions, or that number positions themselves.
NO_PACKING = ("OPT", "Qwen2-VL", "Qwen2.5-VL")

# What a model does is tested in the quick tests on one family of each build, in the slow ones on all.
FEW = ("Llama", "Qwen3", "Gemma3", "GPT-NeoX", "GPT-2")


def behaviours(without: tuple[str, ...] = ()) -> list[Any]:
    """Every family but those named, as test parameters; the ones that are not in :data:`FEW` are marked slow."""
    names = [name for name in FAMILIES if name not in without]
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


def over(families: Iterable[Any]) -> Callable[[_Test], _Test]:
    """Run a test of the contract once for each of these families that its class is for, as the argument ``family``.

    Unlike ``pytest.mark.parametrize`` the tests of other families are not collected, so that nothing has to be skipped.
    """

    def mark(test: _Test) -> _Test:
        vars(test)[_OVER] = list(families)
        return test

    return mark


def families_of(test: Any, known: Iterable[str]) -> list[Any] | None:
    """Those of the families :func:`over` gave a test that are known, as test parameters; ``None``: it is over none."""
    names, given = set(known), getattr(test, _OVER, None)
    if given is None:
        return None
    return [each for each in given if (each if isinstance(each, str) else each.values[0]) in names]
