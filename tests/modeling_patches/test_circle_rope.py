"""Circle-RoPE on models: the contract of patches with text, and what happens to images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from circle_kit import ALL, QWEN, TWO, batch_of, close, generated, logits, one_row, patch, rope_index, rotations, stock
from torch import Tensor

import hfplug
from hfplug.errors import UnsupportedError
from hfplug.families import decoder_of
from hfplug.modeling_patches.circle_rope.geometry import circle
from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES, over


class TestContract(PatchContract):
    """With text, on which this patch promises to do nothing; images are below."""

    method = "circle_rope"
    options: ClassVar[dict[str, Any]] = {"age": "all"}
    families = ALL

    @over(FAMILIES)
    def test_a_fresh_patch_is_the_identity_where_promised(self, family: str) -> None:
        """Text: bit for bit. Images: other logits."""
        model, batch = self.stock(family), self.padded("left")
        images = batch_of(model, TWO)
        before, seen = self.logits(model, batch), logits(model, images)
        self.apply(model)
        assert torch.equal(self.logits(model, batch), before)
        found = logits(model, images)
        assert found.isfinite().all()
        assert (found - seen).abs().max() / seen.abs().max() > 1e-3

    def test_peft_on_top(self, tmp_path: Path) -> None:
        """LoRA on the patched decoder trains on images, reloads on its like, is refused elsewhere, merges exactly."""
        from peft import LoraConfig, PeftModel, get_peft_model

        model = self.stock("Qwen2.5-VL")
        batch = batch_of(model, TWO)
        self.apply(model)
        with self.quiet():
            model.save_pretrained(tmp_path / "base")
        config = LoraConfig(r=2, target_modules=r".*language_model.*_proj", task_type="CAUSAL_LM", init_lora_weights=False)
        adapted = get_peft_model(model, config)
        expected = logits(adapted.eval(), batch)
        adapted(**batch, labels=batch["input_ids"]).loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in adapted.named_parameters() if "lora_" in n)
        adapted.save_pretrained(tmp_path / "adapter")
        with self.quiet():
            again = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
            assert torch.equal(logits(again, batch), expected)
            with pytest.raises(UnsupportedError, match=r"hfplug\.apply\(model, 'circle_rope'"):
                PeftModel.from_pretrained(self.stock("Qwen2.5-VL"), tmp_path / "adapter")
        close(logits(again.merge_and_unload(), batch), expected, 1e-5)


# -- positions ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("side", ["left", "right"])
def test_text_keeps_its_positions_and_images_stand_on_circles(family: str, side: str) -> None:
    """Two images of different shapes in a padded batch; the centre is the first position after the text before the image."""
    model = stock(family)
    batch = batch_of(model, [[3, (2, 3), 4, (1, 2), 2], [2, (3, 2), 1, (2, 2), 3]], side)
    before, deltas = rope_index(model, batch)
    patch(model)
    rows, after = rope_index(model, batch)
    assert rows.shape == (6, *batch["input_ids"].shape)
    assert rows.dtype == torch.float32
    assert torch.equal(rows[:3].long(), before)
    assert torch.equal(after, deltas)
    text = batch["mm_token_type_ids"] == 0
    assert torch.equal(rows[3:, text], rows[:3, text])
    # 3 text tokens and the start token come before the first image, so it starts at 4; it is 3 wide, so the text goes on at 7
    # with the end token, 4 of text, the next start token: 13.
    for row, centre, grid, first in ((0, 4, (2, 3), 0), (0, 13, (1, 2), 6), (1, 3, (3, 2), 0), (1, 9, (2, 2), 6)):
        at = (~text[row]).nonzero()[:, 0][first : first + grid[0] * grid[1]]
        expected = circle(*grid, 0.5, 10.0) + centre
        assert (rows[3:, row, at] - expected).abs().max() < 1e-5
        assert (rows[3:, row, at] != rows[3:, row, at].round()).any(), "the fractions are cut off"


@pytest.mark.parametrize("family", ALL)
def test_the_layers_get_what_their_flag_says(family: str) -> None:
    """On: the model's own frequencies turned by the circle, axis by axis. Off: the rotation of the stock model."""
    model = stock(family)
    batch = batch_of(model, [[3, (2, 2), 2]])
    before, _ = rotations(model, batch)
    patch(model, age=[False, True])
    off, on = rotations(model, batch)
    assert torch.equal(off[0], before[0])
    assert torch.equal(off[1], before[1])
    rotary = decoder_of(model).stack.rotary_emb
    image = (batch["input_ids"] == model.config.image_token_id)[0]
    index = torch.arange(image.shape[0], dtype=torch.float32).expand(3, -1).clone()
    if family == "LLaVA":
        share = [0] * 2 + [1] * 3 + [2] * 3  # 8 frequencies as 16 : 24 : 24
    else:
        index[:, ~image] = torch.tensor([0.0, 1, 2, 3, 6, 7, 8])  # a 2 by 2 image takes two positions
        share = [0, 1, 2, 0] if family == "Qwen3-VL" else [0, 0, 1, 2]
    index[:, image] = circle(2, 2, 0.5, 10.0).float() + 4
    for channel, axis in enumerate(share):
        angle = index[axis] * rotary.inv_freq[channel]
        half = len(share)
        for table, value in ((on[0], angle.cos()), (on[1], angle.sin())):
            assert (table[0, :, channel] - value).abs().max() < 1e-5, (channel, axis)
            assert torch.equal(table[0, :, channel], table[0, :, channel + half])
    assert torch.equal(on[0][0, ~image], off[0][0, ~image]), "text must keep its rotation"
    assert torch.equal(on[1][0, ~image], off[1][0, ~image])


@pytest.mark.parametrize("family", QWEN)
def test_all_layers_are_the_stock_model_at_circle_positions(family: str) -> None:
    """The stock model fed with the circle's positions by hand: the same bits."""
    model = stock(family)
    batch = batch_of(model, TWO)
    twin = copy.deepcopy(model)
    patch(twin, age="all")
    rows, _ = rope_index(twin, batch)
    assert torch.equal(logits(model, {**batch, "position_ids": rows[3:]}), logits(twin, batch))


@pytest.mark.parametrize("family", ALL)
def test_no_layer_is_stock_and_schedules_differ(family: str) -> None:
    model = stock(family)
    batch = batch_of(model, TWO)
    before = logits(model, batch)
    real = batch["attention_mask"].bool()
    found = {}
    for name, age in {"none": (False, False), "all": "all", "alternate": "alternate", "second": "second"}.items():
        handle = patch(model, age=age)
        found[name] = logits(model, batch)[real]
        handle.remove()
    assert torch.equal(found["none"], before[real])
    assert torch.equal(logits(model, batch), before)
    values = [before[real], *(found[n] for n in ("all", "alternate", "second"))]
    for i, one in enumerate(values):
        for other in values[:i]:
            assert (one - other).abs().max() / before.abs().max() > 1e-3


@pytest.mark.parametrize("family", QWEN)
def test_one_image_does_not_move_another(family: str) -> None:
    """Distances within the second image are those it has alone."""
    model = stock(family)
    patch(model)
    both, alone = batch_of(model, [[2, (3, 2), 1, (2, 4), 2]]), batch_of(model, [[5, (2, 4), 2]])
    points = [rope_index(model, b)[0][3:, 0, b["mm_token_type_ids"][0] == 1].T.double() for b in (both, alone)]
    (second, single) = (torch.cdist(p[-8:], p[-8:]) for p in points)
    assert (second - single).abs().max() < 1e-5


# -- running -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_b10_decoding_after_images_is_recomputation(family: str) -> None:
    """Left-padded rows with one and two images: greedy and beams, with a cache and without; each row as alone."""
    model = stock(family)
    patch(model)
    batch = batch_of(model.double(), TWO)
    for settings in ({}, {"num_beams": 3}):
        found, expected = (generated(model, batch, use_cache=c, **settings) for c in (True, False))
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.logits, expected.logits, strict=True):
            close(a, b, 1e-5)
    together = generated(model, batch)
    for row, images in ((0, slice(0, 2)), (1, slice(2, 3))):
        alone = generated(model, one_row(batch, row, images))
        assert torch.equal(together.sequences[row, -8:], alone.sequences[0, -8:])
        close(together.logits[-1][row], alone.logits[-1][0], 1e-5)


@pytest.mark.parametrize("family", ALL)
def test_decoding_by_hand_is_one_forward(family: str) -> None:
    """Prefill with the images, then tokens one by one without positions, as a loop of one's own does."""
    from transformers import DynamicCache

    model = stock(family)
    patch(model)
    batch = batch_of(model.double(), [[3, (2, 2), 6]])
    whole = logits(model, batch)
    cut = batch["input_ids"].shape[1] - 3
    cache = DynamicCache(config=model.config.get_text_config())
    named = ("input_ids", "attention_mask", "mm_token_type_ids")
    found = [logits(model, {k: v[:, :cut] if k in named else v for k, v in batch.items()} | {"cache": cache})]
    steps = batch["input_ids"][:, cut:].split(1, dim=1)
    found += [logits(model, {"input_ids": step, "cache": cache}) for step in steps]
    close(torch.cat(found, 1), whole, 1e-5)


def test_llava_sees_an_image_after_a_cached_prefix() -> None:
    """Without position ids, under either name of the cache: circles stand where the tokens are, not at the start."""
    from transformers import DynamicCache

    model = stock("LLaVA")
    patch(model)
    batch = batch_of(model.double(), [[5, (2, 2), 4]])
    expected = logits(model, batch)
    for name in ("cache", "past_key_values"):
        cache, ids = DynamicCache(config=model.config.get_text_config()), batch["input_ids"]
        first = logits(model, {"input_ids": ids[:, :5], "cache": cache})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old name
            rest = logits(model, {"input_ids": ids[:, 5:], "pixel_values": batch["pixel_values"], name: cache})
        close(torch.cat([first, rest], 1), expected, 1e-5)


@pytest.mark.parametrize("family", QWEN)
def test_positions_of_the_patched_model_may_be_given(family: str) -> None:
    """With and without the text row; slices of them in a prefill in chunks, images in the second one."""
    from transformers import DynamicCache

    model = stock(family)
    patch(model)
    batch = batch_of(model.double(), [[5, (2, 2), 4]])
    expected = logits(model, batch)
    rows, _ = rope_index(model, batch)
    text = torch.arange(rows.shape[2])[None, None].float()
    for given in (rows, torch.cat([text, rows])):
        close(logits(model, {**batch, "position_ids": given}), expected)
    cache, found = DynamicCache(config=model.config.get_text_config()), []
    for here in (slice(0, 4), slice(4, 11), slice(11, None)):
        piece = {"input_ids": batch["input_ids"][:, here], "position_ids": rows[..., here], "cache": cache}
        if here.start == 4:
            piece |= {k: batch[k] for k in ("pixel_values", "image_grid_thw")}
        found.append(logits(model, piece))
    close(torch.cat(found, 1), expected, 1e-5)


@pytest.mark.parametrize("family", QWEN)
def test_deltas_of_other_calls_are_gone(family: str) -> None:
    """``rope_deltas`` outlives a call: on patching it is reset, on removal it is what it was before."""
    model = stock(family)
    batch = batch_of(model, [[3, (3, 2), 4]])
    logits(model, batch)
    left = model.model.rope_deltas
    assert left is not None
    handle = patch(model)
    assert model.model.rope_deltas is None
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad():  # with old deltas this would stand at other positions than it does in a new model
        assert torch.equal(model(inputs_embeds=embeds).logits, stock(family)(inputs_embeds=embeds).logits)
    logits(model, batch_of(model, [[1, (2, 4), 1]]))
    handle.remove()
    assert model.model.rope_deltas is left


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("reentrant", [False, True])
def test_b56_checkpointing_with_images(family: str, reentrant: bool) -> None:
    model = stock(family)
    patch(model)
    batch = batch_of(model, TWO)

    def gradients() -> dict[str, Tensor]:
        model.train().zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    assert any("visual" in n or "vision_tower" in n for n in expected)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    for name, gradient in expected.items():
        close(found[name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2.5-VL", "LLaVA"])
def test_compiled_with_images(family: str) -> None:
    """Graph breaks are allowed: transformers reads the grids with ``tolist``."""
    model = stock(family)
    patch(model)
    batch = batch_of(model, TWO)
    expected = logits(model, batch)
    torch._dynamo.reset()
    try:
        close(logits(torch.compile(model, backend="eager"), batch), expected)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("family", ALL)
def test_b50_reloaded_with_images(family: str, tmp_path: Path) -> None:
    model = stock(family)
    patch(model, age=(False, True), radius="auto-3", alpha=0.25)
    batch = batch_of(model, TWO)
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, batch), expected)
    assert hfplug.applied(loaded)[0].patch == hfplug.applied(model)[0].patch
    hfplug.applied(loaded)[0].remove()
    assert torch.equal(logits(loaded, batch), logits(stock(family), batch))


@pytest.mark.parametrize("family", ALL)
def test_half_precision_rotates_by_fp32_positions(family: str) -> None:
    """bf16 weights: cosine and sine are made from fp32 positions and cast once, so they are off by half an ulp of bf16."""
    model = stock(family)
    patch(model, age="all")
    batch = batch_of(model, [[40, (2, 2), 3]])
    exact, rotary = rotations(model, batch)[0], decoder_of(model).stack.rotary_emb
    frequencies = rotary.inv_freq
    model.to(torch.bfloat16)
    rotary.inv_freq = frequencies  # from_pretrained(dtype=...) keeps them in fp32, .to() does not
    found = rotations(model, {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()})[0]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).abs().max() <= 2**-9


def test_patching_a_model_that_has_an_adapter_and_an_optimizer() -> None:
    from peft import LoraConfig, get_peft_model

    model = stock("Qwen2.5-VL")
    batch = batch_of(model, TWO)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*_proj", init_lora_weights=False)).eval()
    before = logits(adapted, batch)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.1)
    handle = patch(adapted)
    assert (logits(adapted, batch) - before).abs().max() > 1e-3
    handle.remove()
    assert torch.equal(logits(adapted, batch), before)
    del optimizer


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
