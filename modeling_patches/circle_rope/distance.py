"""PTD, the per-token distance: how unequally far the tokens of an image are from a text token, in steps of position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hfplug.errors import ConfigError, nearest
from hfplug.families import decoder_of
from hfplug.modeling_patches.circle_rope.geometry import IMAGE, Block, blocks, circle
from hfplug.modeling_patches.circle_rope.patch import FAMILIES, CircleRope, llava_blocks, llava_grid
from hfplug.patches import applied

Layout = Literal["hard", "spatial", "unordered", "circle"]


def per_token_distance(text: Tensor, image: Tensor) -> Tensor:
    """PTD of the tokens of one image: ``mean over t and i of |d(t, i) - mean over i of d(t, i)|``, ``d`` Euclidean.

    Args:
        text: ``(text tokens, axes)``, positions.
        image: ``(image tokens, axes)``, positions.

    Returns:
        a scalar fp64, in steps of position; 0 when every text token is equally far from all tokens of the image.

    Raises:
        ConfigError: shapes that do not fit, or no tokens.
    """
    if text.dim() != 2 or image.dim() != 2 or text.shape[1] != image.shape[1] or not text.numel() or not image.numel():
        raise ConfigError(f"text={tuple(text.shape)} and image={tuple(image.shape)} must be (tokens, axes) with the same axes")
    distance = (text.double()[:, None] - image.double()[None]).norm(dim=-1)
    return (distance - distance.mean(1, keepdim=True)).abs().mean()


def layout(name: Layout, height: int = 3, width: int = 3, text: int = 5, radius: float = 10.0) -> tuple[Tensor, Tensor]:
    """The paper's example layouts of an image and the text after it: positions for :func:`per_token_distance`.

    ``"hard"``: one running index. ``"spatial"``: (h, w) of the cell. ``"unordered"``: one index for the whole image.
    ``"circle"``: ours, with alpha 0.5. Text stands at ``height * width`` and after, the same index on
    every axis; this is the reading under
    which a 3 by 3 image and 5 text tokens give the paper's 2.22, 0.64, 0 and 0.

    Returns:
        ``(text, axes)`` and ``(height * width, axes)`` fp64.
    """
    count = height * width
    after = torch.arange(count, count + text, dtype=torch.float64)[:, None]
    index = torch.arange(count, dtype=torch.float64)[:, None]
    if name == "hard":
        return after, index
    if name == "spatial":
        return after.expand(text, 2), torch.cat([index // width, index % width], 1)
    if name == "unordered":
        return after.expand(text, 3), torch.zeros(count, 3, dtype=torch.float64)
    if name == "circle":
        return after.expand(text, 3), circle(height, width, 0.5, radius).T
    known = ("hard", "spatial", "unordered", "circle")
    raise ConfigError(f"layout={name!r} is not one of {known}{nearest(name, known)}")


def ptd(model: Any, inputs: Mapping[str, Any]) -> tuple[float, ...]:
    """PTD of the positions a model gives to a batch, layer by layer.

    The mean over the images of the batch, each against all real text tokens of its row, before and after it. Distances are
    taken in the axes the layer really uses: (t, h, w) under M-RoPE and Circle-RoPE, the one running index in a stock LLaVA. (The
    paper's figure for M-RoPE, 0.64, leaves the time axis out: see :func:`layout`.)

    PTD describes indices, not attention: 0 does not mean that RoPE treats the tokens of an image alike, because each axis
    has frequencies of its own. Video tokens are left out.

    Args:
        model: Qwen2-VL, Qwen2.5-VL, Qwen3-VL or LLaVA, patched or not.
        inputs: a batch as the processor makes it: ``input_ids`` and, where there is one, ``attention_mask``; for Qwen also
            ``mm_token_type_ids`` and ``image_grid_thw``.

    Returns:
        a number for each decoder layer, in steps of position.

    Raises:
        ConfigError: something is missing in the batch, or it holds no image or no text beside one.
        UnsupportedError: a model of another family.
    """
    decoder = decoder_of(model, FAMILIES)
    patch = next((h.patch for h in applied(model) if isinstance(h.patch, CircleRope)), None)
    wanted = ("input_ids", "mm_token_type_ids", "image_grid_thw") if hasattr(decoder.base, "get_rope_index") else ("input_ids",)
    if missing := [name for name in wanted if inputs.get(name) is None]:
        raise ConfigError(f"ptd needs {missing[0]!r} in the batch, which holds {sorted(map(str, inputs))}")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if hasattr(decoder.base, "get_rope_index"):
        types, merge = inputs["mm_token_type_ids"], int(decoder.base.config.vision_config.spatial_merge_size)
        named = {k: inputs.get(k) for k in ("image_grid_thw", "video_grid_thw", "attention_mask")}
        rows, _ = decoder.base.get_rope_index(ids, mm_token_type_ids=types, **named)
        stock, moved = rows[:3], rows[3:]
        found: Iterator[Block] = blocks(types, mask, {IMAGE: inputs["image_grid_thw"]}, merge)
        texts = (types == 0) & real
    else:
        stock = (real.cumsum(1) - 1).clamp(min=0)[None]
        height, width = llava_grid(decoder.base.config)
        image = (ids == decoder.base.config.image_token_id) & real
        found, texts = llava_blocks(image, height, width), ~image & real
        moved = patch.llava_positions(stock[0], image, height, width) if patch is not None else stock
    kinds = {False: stock, True: moved}
    sums, count = dict.fromkeys(kinds, 0.0), 0
    for block in found:
        if block.kind == IMAGE and bool(texts[block.row].any()):
            count += 1
            for kind, rows in kinds.items():
                if rows.shape[0]:
                    here = rows[:, block.row].T
                    sums[kind] += float(per_token_distance(here[texts[block.row]], here[block.tokens]))
    if not count:
        raise ConfigError("ptd needs at least one image with text in the same row, and the batch holds none")
    depth = len(decoder.layers)
    return tuple(sums[on] / count for on in (patch.schedule(depth) if patch is not None else (False,) * depth))
