"""Batches with images, and what the tests of Circle-RoPE do with a model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import hfplug
from hfplug.families import decoder_of
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
