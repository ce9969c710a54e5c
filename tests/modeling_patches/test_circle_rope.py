"""Circle-RoPE on models: the contract of patches with text, and what happens to images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import decoder_of
from hfplug.modeling_patches.circle_rope.distance import per_token_distance, ptd
from hfplug.modeling_patches.circle_rope.geometry import circle
from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES

QWEN = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL")
ALL = (*QWEN, "LLaVA")
START, END = 58, 59
TWO = [[3, (2, 2), 4, (2, 2), 3], [2, (2, 2), 2]]  # two images, one image


def stock(family: str) -> Any:
    return FAMILIES[family]().eval()


def batch_of(model: Any, rows: list[list[Any]], side: str = "left", seed: int = 0) -> dict[str, Any]:
    """A padded batch: an int in a row is so many text tokens, a pair an image of that height and width in tokens.

    A triple is a video. LLaVA takes 2 by 2 images alone, and neither types nor grids.
    """
    generator = torch.Generator().manual_seed(seed)
    lines: list[list[int]] = []
    types: list[list[int]] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for row in rows:
        ids: list[int] = []
        kinds: list[int] = []
        for part in row:
            if isinstance(part, int):
                ids += torch.randint(3, 58, (part,), generator=generator).tolist()
                kinds += [0] * part
                continue
            kind = 2 if len(part) == 3 else 1
            frames, height, width = (1, *part) if kind == 1 else part
            grids[kind].append([frames, height, width])
            count = frames * height * width
            token = model.config.video_token_id if kind == 2 else model.config.image_token_id
            ids += [START, *[token] * count, END]
            kinds += [0, *[kind] * count, 0]
        lines.append(ids)
        types.append(kinds)
    longest = max(map(len, lines))

    def padded(values: list[list[int]]) -> Tensor:
        return torch.tensor([[0] * (longest - len(v)) + v if side == "left" else v + [0] * (longest - len(v)) for v in values])

    out: dict[str, Any] = {"input_ids": padded(lines), "attention_mask": padded([[1] * len(v) for v in lines])}
    vision = model.config.vision_config
    if not hasattr(model.model, "get_rope_index"):
        size = (len(grids[1]), 3, vision.image_size, vision.image_size)
        return {**out, "pixel_values": torch.randn(size, generator=generator)}
    out["mm_token_type_ids"] = padded(types)
    merge, channels = vision.spatial_merge_size, 3 * vision.temporal_patch_size * vision.patch_size**2
    for kind, pixels, name in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        if grids[kind]:
            out[name] = torch.tensor([[t, h * merge, w * merge] for t, h, w in grids[kind]])
            out[pixels] = torch.randn(int(out[name].prod(1).sum()), channels, generator=generator)
    return out


def one_row(batch: dict[str, Any], row: int, images: slice) -> dict[str, Any]:
    """A row of a batch without its padding, with its images."""
    real = batch["attention_mask"][row].bool()
    out = {k: batch[k][row : row + 1, real] for k in ("input_ids", "attention_mask", "mm_token_type_ids") if k in batch}
    if "image_grid_thw" in batch:
        pixels = batch["pixel_values"].split(batch["image_grid_thw"].prod(1).tolist())
        return {**out, "image_grid_thw": batch["image_grid_thw"][images], "pixel_values": torch.cat(pixels[images])}
    return {**out, "pixel_values": batch["pixel_values"][images]}


def logits(model: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def patch(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hfplug.apply(model, "circle_rope", **options)


def rope_index(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    return model.model.get_rope_index(**{k: batch[k] for k in names if k in batch})


def rotations(model: Any, batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Cosine and sine that the attention of each layer was given."""
    seen: list[tuple[Tensor, Tensor]] = []
    attentions = [layer.self_attn for layer in decoder_of(model).layers]
    handles = [
        a.register_forward_pre_hook(lambda m, a, k: seen.append(k["position_embeddings"]), with_kwargs=True) for a in attentions
    ]
    logits(model, batch)
    for handle in handles:
        handle.remove()
    return seen


def generated(model: Any, batch: dict[str, Any], **settings: Any) -> Any:
    shared: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    shared["suppress_tokens"] = [60, 61, model.config.image_token_id]  # a token of an image without a picture is an error
    return model.generate(**batch, **{**shared, "return_dict_in_generate": True, "output_logits": True, **settings})


def close(found: Tensor, expected: Tensor, bound: float = 1e-6) -> None:
    difference = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert difference <= bound, f"{difference:.2e}"


class TestContract(PatchContract):
    """With text, on which this patch promises to do nothing; images are below."""

    method = "circle_rope"
    options: ClassVar[dict[str, Any]] = {"age": "all"}


    @pytest.mark.parametrize("family", FAMILIES)
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
