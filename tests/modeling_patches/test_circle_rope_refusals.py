"""Circle-RoPE: videos, what is refused, and PTD of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from circle_kit import ALL, QWEN, batch_of, logits, one_row, patch, rope_index, stock

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.modeling_patches.circle_rope.distance import per_token_distance, ptd
from hfplug.modeling_patches.circle_rope.geometry import circle
from hfplug.testing.patch_models import FAMILIES

# -- videos ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
def test_videos_are_refused_kept_or_put_on_circles(family: str) -> None:
    """Beside an image, which is on its circle in any case. Each frame has a circle round its own time."""
    model = stock(family)
    rows: list[list[Any]] = [[2, (2, 2), 3, (1, 2, 3), 1, (1, 2, 3), 2]]
    if family != "Qwen3-VL":  # which writes every frame of a video by itself
        rows = [[2, (2, 2), 3, (3, 2, 3), 2]]
    batch = batch_of(model, rows)
    if family == "Qwen3-VL":
        batch["video_grid_thw"] = torch.tensor([[2, 4, 6]])
    before, _ = rope_index(model, batch)
    expected = logits(model, batch)
    handle = patch(model)
    with pytest.raises(UnsupportedError, match="video='mrope'"):
        logits(model, batch)
    handle.remove()
    video = batch["mm_token_type_ids"][0] == 2
    image = batch["mm_token_type_ids"][0] == 1
    for choice in ("mrope", "frames"):
        handle = patch(model, video=choice, age="all")
        rows6, _ = rope_index(model, batch)
        assert torch.equal(rows6[:3].long(), before)
        assert (rows6[3:, 0, image] - before[0, 0, image] - circle(2, 2, 0.5, 10.0)).abs().max() < 1e-5
        if choice == "mrope":
            assert torch.equal(rows6[3:, 0, video], rows6[:3, 0, video])
        else:
            frames = before[0, 0, video].reshape(-1, 6)
            assert len({int(f[0]) for f in frames}) == len(frames) > 1
            found = rows6[3:, 0, video].reshape(3, -1, 6) - frames[None]
            assert (found - circle(2, 3, 0.5, 10.0)[:, None]).abs().max() < 1e-5
        assert (logits(model, batch) - expected).abs().max() > 1e-3
        handle.remove()


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
def test_images_at_stock_positions_are_refused(family: str) -> None:
    """Whatever would leave images where the stock model has them, in silence."""
    from transformers import DynamicCache

    model = stock(family)
    batch = batch_of(model, [[3, (2, 2), 2]])
    positions, _ = rope_index(model, batch)
    patch(model)
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(3, "):
        logits(model, {**batch, "position_ids": positions})
    with pytest.raises(UnsupportedError, match="'mm_token_type_ids'"):
        logits(model, {k: v for k, v in batch.items() if k != "mm_token_type_ids"})
    rows, _ = rope_index(model, batch)
    for dtype in (torch.int64, torch.bfloat16):
        with pytest.raises(UnsupportedError, match="cuts the fractions"):
            logits(model, {**batch, "position_ids": rows.to(dtype)})
    cache = DynamicCache(config=model.config.get_text_config())
    logits(model, {**batch, "cache": cache})
    with pytest.raises(UnsupportedError, match="continues a cache"):
        logits(model, {k: v for k, v in batch.items() if k != "attention_mask"} | {"cache": cache})


def test_llava_refuses_what_it_cannot_place() -> None:
    model = stock("LLaVA")
    batch = batch_of(model, [[3, (2, 2), 2]])
    patch(model)
    with pytest.raises(UnsupportedError, match="vision_feature_select_strategy='full'"):
        logits(model, {**batch, "vision_feature_select_strategy": "full"})
    with pytest.raises(UnsupportedError, match="image_sizes"):
        logits(model, {**batch, "image_sizes": torch.tensor([[8, 8]])})
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(UnsupportedError, match="input_ids"):
        model(inputs_embeds=embeds, pixel_values=batch["pixel_values"])
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(3, 1, 11\)"):
        logits(model, {**batch, "position_ids": torch.zeros(3, 1, 11)})
    torn = batch["input_ids"].clone()
    torn[0, 7], torn[0, 9] = 5, model.config.image_token_id
    with pytest.raises(ConfigError, match="not whole images of 2 x 2"):
        logits(model, {**batch, "input_ids": torn})


def test_models_that_cannot_be_patched_are_refused() -> None:
    model = stock("Qwen2.5-VL")
    with pytest.raises(UnsupportedError, match="text part alone"):
        patch(model.model.language_model)
    with pytest.raises(ConfigError, match="3 flags, and the model 2 layers"):
        patch(model, age=[True, False, True])
    with pytest.raises(UnsupportedError, match="known: Qwen2-VL"):
        patch(FAMILIES["Llama"]())
    model.model.language_model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UnsupportedError, match="'dynamic'"):
        patch(model)
    assert hfplug.applied(model) == ()


# -- PTD of a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_ptd_of_a_model(family: str) -> None:
    """Layers with circles have 0; the others what the stock model has: by hand, from the positions."""
    model = stock(family)
    batch = batch_of(model, [[3, (2, 2), 2]])
    before = ptd(model, batch)
    image = torch.tensor([[4.0, 4, 4], [4, 4, 5], [4, 5, 4], [4, 5, 5]])
    text = torch.tensor([0.0, 1, 2, 3, 6, 7, 8])[:, None].expand(7, 3)
    if family == "LLaVA":
        image, text = torch.tensor([4.0, 5, 6, 7])[:, None], torch.tensor([0.0, 1, 2, 3, 8, 9, 10])[:, None]
    assert before == pytest.approx([float(per_token_distance(text, image))] * 2, abs=1e-6)
    patch(model, age=(False, True))
    after = ptd(model, batch)
    assert after[0] == pytest.approx(before[0], abs=1e-6)
    assert after[1] < 1e-5


@pytest.mark.parametrize("family", QWEN)
def test_ptd_is_a_mean_over_images_and_leaves_padding_out(family: str) -> None:
    model = stock(family)
    batch = batch_of(model, [[3, (2, 3), 4], [2, (3, 3), 1]])
    alone = [ptd(model, one_row(batch, row, slice(row, row + 1)))[0] for row in (0, 1)]
    assert abs(alone[0] - alone[1]) > 1e-2
    assert ptd(model, batch)[0] == pytest.approx(sum(alone) / 2, abs=1e-9)


def test_ptd_says_what_is_missing() -> None:
    model = stock("Qwen2.5-VL")
    batch = batch_of(model, [[3, (2, 2), 2]])
    with pytest.raises(ConfigError, match="needs 'image_grid_thw'"):
        ptd(model, {k: v for k, v in batch.items() if k != "image_grid_thw"})
    with pytest.raises(ConfigError, match="at least one image"):
        ptd(stock("LLaVA"), {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    with pytest.raises(UnsupportedError, match="known: Qwen2-VL"):
        ptd(FAMILIES["Llama"](), batch)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
