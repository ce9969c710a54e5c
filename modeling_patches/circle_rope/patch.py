"""The patch: circle positions travel beside the stock ones, and each layer takes the ones its schedule says.

``get_rope_index`` of the patched model returns the three stock rows and, below them, three rows of circle positions. They
travel by value wherever position ids go (beam search, slices of a prefill, the text row that generation puts on top), so
nothing has to be remembered between calls. The token stack's pre-hook takes them apart again: the model sees its integer rows,
the layers get both rotations and use one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hfplug.calls import cache_of, named_arguments
from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.families import Decoder, decoder_of
from hfplug.ledger import Ledger
from hfplug.modeling_patches.circle_rope.geometry import IMAGE, VIDEO, Block, auto_factor, blocks, circle, on_circles
from hfplug.modelpatch import WORKS_WITH, ModelPatch

FAMILIES = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "LLaVA")
SCHEDULES = ("alternate", "all", "first", "second")
LLAVA_STACKS = ("Llama", "Mistral", "Qwen2", "Qwen3")  # rotary over whole heads, layers that pass arguments on
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the positions of the call
_KEY = "circle_rope"  # argument that carries the circle rotation from the stack to its layers


@dataclass(frozen=True)
class CircleRope(ModelPatch):
    """Options of Circle-RoPE.

    Defaults are those of the authors' configuration and best ablation.
    """

    method: ClassVar[str] = "circle_rope"
    families: ClassVar[tuple[str, ...] | None] = FAMILIES
    works_with: ClassVar[frozenset[str]] = frozenset(WORKS_WITH)

    alpha: float = field(
        default=0.5, metadata={"help": "share of the spatial angle, 0 to 1; the rest is the angle of the index. 1 merges tokens"}
    )
    radius: float | str = field(
        default=10.0, metadata={"help": "of the circle, in steps of position; 'auto-k': k times half the image's longer side"}
    )
    age: Literal["alternate", "all", "first", "second"] | tuple[bool, ...] = field(
        default="alternate",
        metadata={"help": "which layers see the circle: 0, 2, 4, ...; all; the first or second half; or a flag for each layer"},
    )
    video: Literal["refuse", "mrope", "frames"] = field(
        default="refuse", metadata={"help": "videos: refused, at their stock positions, or a circle for each frame (ours)"}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha!r} must be a number from 0 to 1")
        if isinstance(self.radius, str):
            auto_factor(self.radius)
        elif isinstance(self.radius, bool) or not 0 < self.radius < math.inf:
            raise ConfigError(f"radius={self.radius!r} must be a positive number, 'auto' or 'auto-k'")
        if isinstance(self.age, str) and self.age not in SCHEDULES:
            near = nearest(self.age, SCHEDULES)
            raise ConfigError(f"age={self.age!r} is not one of {SCHEDULES} or a flag for each layer{near}")
        if not isinstance(self.age, str):
            object.__setattr__(self, "age", tuple(self.age))
            if not all(isinstance(flag, bool) for flag in self.age):
                raise ConfigError(f"age={self.age!r} must be a flag, true or false, for each layer")
        if self.video not in (choices := ("refuse", "mrope", "frames")):
            raise ConfigError(f"video={self.video!r} is not one of {choices}{nearest(self.video, choices)}")

    # -- which layers --------------------------------------------------------------------------------------------------

    def schedule(self, depth: int) -> tuple[bool, ...]:
        """Whether each of ``depth`` layers uses the circle (AGE). The middle layer of an odd depth belongs to the first half.

        Raises:
            ConfigError: the flags given are not ``depth`` many.
        """
        if isinstance(self.age, str):
            first = (depth + 1) // 2
            layers = {
                "alternate": range(0, depth, 2), "all": range(depth), "first": range(first), "second": range(first, depth),
            }[self.age]  # fmt: skip
            return tuple(i in layers for i in range(depth))
        if len(self.age) != depth:
            raise ConfigError(f"age has {len(self.age)} flags, and the model {depth} layers")
        return self.age

    # -- the structure ---------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Hooks on every layer, the token stack and the module that puts images and text together; no parameter changes."""
        decoder = decoder_of(model, FAMILIES)
        flags = self.schedule(len(decoder.layers))
        if decoder.base is decoder.stack:
            raise UnsupportedError(
                f"circle_rope: {type(model).__name__} is the text part alone; patch the whole model, which knows where images are"
            )
        rotary = decoder.stack.rotary_emb
        if rotary.rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"circle_rope: rope_type {rotary.rope_type!r} computes its frequencies from the largest position of a call, so "
                f"circles would change those of the text; known: {', '.join(ROPE_TYPES)}"
            )
        if hasattr(decoder.base, "get_rope_index"):
            merge = int(decoder.base.config.vision_config.spatial_merge_size)
            index = functools.partial(self._rope_index, decoder.base.get_rope_index, merge)
            ledger.set_attr(decoder.base, "get_rope_index", index)
            ledger.set_attr(decoder.base, "rope_deltas", None)  # left from an earlier call, and read by the next one
            ledger.hook(decoder.base, "forward_pre", self._check_qwen, with_kwargs=True)
        else:
            _check_llava(decoder)
            ledger.hook(decoder.base, "forward_pre", self._place_llava, with_kwargs=True)
        ledger.hook(decoder.stack, "forward_pre", self._split, with_kwargs=True, prepend=True)
        for layer, on in zip(decoder.layers, flags, strict=True):
            ledger.hook(layer, "forward_pre", self._take if on else self._leave, with_kwargs=True)

    def notes(self, decoder: Decoder) -> Sequence[str]:
        """Which layers, and what a forward costs."""
        on = [i for i, flag in enumerate(self.schedule(len(decoder.layers))) if flag]
        return (f"circle positions in layers {on}; one more rotary table for a call with images, nothing for text",)

    def warnings(self, decoder: Decoder) -> Sequence[str]:
        """A stock checkpoint is worse after the patch until it is tuned."""
        return (
            "a model trained with other positions must be tuned after this patch; until then expect worse answers about images",
        )

    # -- positions ---------------------------------------------------------------------------------------------------------

    def _rope_index(self, stock: Any, merge: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """``get_rope_index`` with three more rows: ``(6, batch, tokens)`` fp32; text and ``rope_deltas`` as stock."""
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        positions, deltas = stock(*args, **kwargs)
        types, mask = given["mm_token_type_ids"], given.get("attention_mask")
        if self.video == "refuse" and bool((types == VIDEO).any()):
            raise UnsupportedError(
                "circle_rope: the batch holds a video, for which the paper defines no circle; apply the patch with video='mrope' "
                "(videos keep their stock positions) or video='frames' (a circle for each frame)"
            )
        grids = {IMAGE: given.get("image_grid_thw")}
        if self.video == "frames":
            grids[VIDEO] = given.get("video_grid_thw")
        circles = on_circles(positions, blocks(types, mask, grids, merge), self.alpha, self.radius)
        return torch.cat([positions.to(circles.dtype), circles]), deltas

    def llava_positions(self, positions: Tensor, image: Tensor, height: int, width: int) -> Tensor:
        """Positions on three axes for a model with one: text at ``(p, p, p)``, images on circles round their first position.

        Args:
            positions: ``(batch, tokens)``, as stock.
            image: ``(batch, tokens)`` bool, the tokens of images of ``height`` by ``width`` cells, one image after the other.

        Returns:
            ``(3, batch, tokens)`` fp32.
        """
        cell = (image.cumsum(1) - 1).clamp(min=0) % (height * width)
        at = torch.arange(image.shape[1], device=image.device)
        first = positions.gather(1, (at - cell).clamp(min=0))
        points = circle(height, width, self.alpha, self.radius).to(cell.device, torch.float32)[:, cell]
        return torch.where(image, first + points, positions.float())

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def _check_qwen(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Images whose positions would silently be stock ones are refused."""
        call = named_arguments(base, args, kwargs)
        encoded = call.get("mm_encoder_outputs") or {}
        seen = [call.get("pixel_values"), call.get("pixel_values_videos"), encoded.get("image"), encoded.get("video")]
        if all(each is None for each in seen):
            return
        positions = call.get("position_ids")
        if positions is not None:
            if not (positions.dim() == 3 and positions.shape[0] in (6, 7)):
                raise UnsupportedError(
                    f"circle_rope: position_ids of shape {tuple(positions.shape)} say nothing of circles; leave them out, or "
                    "take those of get_rope_index of the patched model"
                )
            return
        cache = cache_of(call)
        names = ("input_ids", "mm_token_type_ids")
        missing = [n for n in names if call.get(n) is None]
        if call.get("image_grid_thw") is None and call.get("video_grid_thw") is None:
            missing.append("image_grid_thw")
        if missing:
            raise UnsupportedError(f"circle_rope: a call with images needs {missing[0]!r} or position_ids to know where they are")
        if base.rope_deltas is not None and cache is not None and cache.get_seq_length() > 0:
            raise UnsupportedError(
                "circle_rope: images in a call that continues a cache get positions of text; give position_ids, which "
                "get_rope_index makes from all tokens so far (generate() does)"
            )

    def _place_llava(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Position ids ``(4, batch, tokens)``: those of the text, then three rows of circles."""
        call = named_arguments(base, args, kwargs)
        if call.get("pixel_values") is None and (call.get("mm_encoder_outputs") or {}).get("image") is None:
            return None
        ids, positions, config = call.get("input_ids"), call.get("position_ids"), base.config
        if ids is None:
            raise UnsupportedError("circle_rope: a call with images needs input_ids to know where they are")
        if call.get("image_sizes") is not None:
            raise UnsupportedError("circle_rope: image_sizes: images of different grids are not handled in LLaVA models")
        for name in ("vision_feature_select_strategy", "vision_feature_layer"):
            if call.get(name) not in (None, wanted := getattr(config, name)):
                raise UnsupportedError(f"circle_rope: {name}={call[name]!r} is not {wanted!r}, that of the configuration")
        if positions is None:
            cache = cache_of(call)
            past = cache.get_seq_length() if cache is not None else 0
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + past
        if positions.dim() != 2:
            raise UnsupportedError(f"circle_rope: position_ids of shape {tuple(positions.shape)}; LLaVA takes (batch, tokens)")
        positions, image = positions.expand(ids.shape), ids == config.image_token_id
        height, width = llava_grid(config)
        if not torch.compiler.is_compiling():
            for _ in llava_blocks(image, height, width):
                pass  # it raises where an image is not in one piece
        circles = self.llava_positions(positions, image, height, width)
        call["position_ids"] = torch.cat([positions[None].to(circles.dtype), circles])
        return (), call

    def _split(self, stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the stack the positions it knows; make the circle rotation for its layers."""
        call = named_arguments(stack, args, kwargs)
        positions = call.get("position_ids")
        one_axis = not hasattr(stack.rotary_emb, "mrope_section")
        if positions is None or positions.dim() != 3 or positions.shape[0] not in ((4,) if one_axis else (6, 7)):
            return None
        if positions.dtype != torch.float32:
            raise UnsupportedError(
                f"circle_rope: positions came as {positions.dtype}, which cuts the fractions of circles off; something between "
                "get_rope_index and the decoder casts them (FSDP's cast_forward_inputs does: do not shard the decoder by itself)"
            )
        own, circles = positions[:-3].long(), positions[-3:]
        x = call.get("inputs_embeds")
        x = stack.get_input_embeddings().weight if x is None else x  # asked for its dtype and device only
        rotation = _three_axes(stack.rotary_emb, x, circles) if one_axis else stack.rotary_emb(x, circles)
        return (), {**call, "position_ids": own[0] if one_axis else own, _KEY: rotation}

    def _take(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _KEY not in kwargs:
            return None
        rest = {k: v for k, v in kwargs.items() if k != _KEY}
        return args, {**rest, "position_embeddings": kwargs[_KEY]}

    def _leave(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args, {k: v for k, v in kwargs.items() if k != _KEY}) if _KEY in kwargs else None


# -- LLaVA: one axis becomes three -----------------------------------------------------------------------------------------


def sections(half: int) -> tuple[int, int, int]:
    """How many of a head's ``half`` frequencies go to t, h and w: 16 : 24 : 24, as in Qwen2.5-VL."""
    time = max(1, half // 4)
    height = (half - time + 1) // 2
    return time, height, half - time - height


def _three_axes(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``(batch, tokens, head size)``: each frequency is that of the one-axis model, turned by its own axis."""
    tables = [rotary(x, row) for row in positions]
    parts = sections(tables[0][0].shape[-1] // 2) * 2
    out = []
    for which in (0, 1):
        split = [table[which].split(parts, dim=-1) for table in tables]
        out.append(torch.cat([split[i % 3][i] for i in range(len(parts))], dim=-1))
    return out[0], out[1]


def _check_llava(decoder: Decoder) -> None:
    if decoder.family.name not in LLAVA_STACKS:
        raise UnsupportedError(
            f"circle_rope: LLaVA on a {decoder.family.name} decoder is not known; known: {', '.join(LLAVA_STACKS)}"
        )
    half = decoder.stack.rotary_emb.inv_freq.shape[0]
    if min(sections(half)) < 1:
        raise UnsupportedError(f"circle_rope: heads of {2 * half} channels cannot be shared between three axes")
    llava_grid(decoder.base.config)


def llava_grid(config: Any) -> tuple[int, int]:
    """Height and width in tokens of every image of a LLaVA model.

    Raises:
        UnsupportedError: its image tokens are not the cells of one fixed grid.
    """
    vision, strategy = config.vision_config, config.vision_feature_select_strategy
    # "default" drops the class token, which CLIP has and SigLIP has not.
    if (vision.model_type, strategy) not in (("clip_vision_model", "default"), ("siglip_vision_model", "full")):
        raise UnsupportedError(
            f"circle_rope: image tokens of a {vision.model_type!r} tower with vision_feature_select_strategy={strategy!r} are "
            "not known to be the cells of a grid; known: clip_vision_model with 'default', siglip_vision_model with 'full'"
        )
    side: Any = vision.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return int(height) // int(vision.patch_size), int(width) // int(vision.patch_size)


def llava_blocks(image: Tensor, height: int, width: int) -> Iterator[Block]:
    """The images of a batch whose images all have one grid; ``image`` is ``(batch, tokens)`` bool.

    Raises:
        ConfigError: the tokens of an image do not stand together, or are too few.
    """
    count = height * width
    for row, line in enumerate(image):
        tokens = line.nonzero()[:, 0]
        for start in range(0, len(tokens), count):
            here = tokens[start : start + count]
            if len(here) < count or int(here[-1] - here[0]) != count - 1:
                raise ConfigError(f"input_ids: row {row} has image tokens that are not whole images of {height} x {width} tokens")
            yield Block(row, IMAGE, here, 1, height, width)


__all__ = ["FAMILIES", "CircleRope", "llava_blocks", "llava_grid", "sections"]
