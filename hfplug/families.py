"""The families of decoders that model patches know: where their layers, projections and norms stand, and of what kind they are.

One table for every patch, so that a family is added once. A patch asks :func:`decoder_of`, never a class name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfplug.calls import parameter_names, token_stack
from hfplug.errors import HfplugError, UnsupportedError, nearest


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the decoder layers of one family are built; every path is relative to a layer.

    Attributes:
        name: as users call it.
        model_types: ``config.model_type`` of the token stack (of the text part, in a vision-language model).
        projections: path -> role. ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"gate"``, ``"up"``, ``"down"`` stand for themselves;
            ``"q|k|v"`` and ``"gate|up"`` are parts one after the other; ``"q/k/v"`` are interleaved, head by head.
        attention: the attention module.
        mlp: the MLP module; ``""``: its projections stand in the layer itself.
        norms: the norms on whole hidden states, in the order of the forward.
        head_norms: the norms on single heads of queries and keys.
        layers: the list of layers, relative to the token stack.
        final_norm: the norm before the head, relative to the token stack.
        parallel: attention and MLP read the same input (GPT-NeoX; ``config.use_parallel_residual`` says whether really).
        unit_offset: the norms scale by ``1 + weight``.
        conv1d: projections are transformers' ``Conv1D``, whose weight is ``(in, out)``.
    """

    name: str
    model_types: tuple[str, ...]
    projections: Mapping[str, str]
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, ...] = ()
    layers: str = "layers"
    final_norm: str = "norm"
    parallel: bool = False
    unit_offset: bool = False
    conv1d: bool = False


_ATTENTION = {f"self_attn.{name}_proj": name for name in ("q", "k", "v", "o")}
_LLAMA = {**_ATTENTION, "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_HEADS = ("self_attn.q_norm", "self_attn.k_norm")

FAMILIES = (
    Family(name="Llama", model_types=("llama",), projections=_LLAMA),
    Family(name="Mistral", model_types=("mistral",), projections=_LLAMA),
    Family(name="Qwen2", model_types=("qwen2",), projections=_LLAMA),
    Family(name="Qwen3", model_types=("qwen3",), projections=_LLAMA, head_norms=_HEADS),
    Family(name="Gemma2", model_types=("gemma2",), projections=_LLAMA, norms=_GEMMA_NORMS, unit_offset=True),
    Family(
        name="Gemma3", model_types=("gemma3_text",), projections=_LLAMA, norms=_GEMMA_NORMS, head_norms=_HEADS, unit_offset=True
    ),
    Family(
        name="GPT-NeoX", model_types=("gpt_neox",), attention="attention", final_norm="final_layer_norm", parallel=True,
        projections={
            "attention.query_key_value": "q/k/v", "attention.dense": "o", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down",
        },
    ),
    Family(
        name="GPT-2", model_types=("gpt2",), attention="attn", norms=("ln_1", "ln_2"), layers="h", final_norm="ln_f", conv1d=True,
        projections={"attn.c_attn": "q|k|v", "attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down"},
    ),
    Family(
        name="OPT", model_types=("opt",), mlp="", norms=("self_attn_layer_norm", "final_layer_norm"),
        final_norm="final_layer_norm",
        projections={
            "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.out_proj": "o",
            "fc1": "up", "fc2": "down",
        },
    ),
    Family(
        name="Phi-3", model_types=("phi3",),
        projections={
            "self_attn.qkv_proj": "q|k|v", "self_attn.o_proj": "o", "mlp.gate_up_proj": "gate|up", "mlp.down_proj": "down",
        },
    ),
    Family(name="Qwen2-VL", model_types=("qwen2_vl_text",), projections=_LLAMA),
    Family(name="Qwen2.5-VL", model_types=("qwen2_5_vl_text",), projections=_LLAMA),
    Family(name="Qwen3-VL", model_types=("qwen3_vl_text",), projections=_LLAMA, head_norms=_HEADS),
)  # fmt: skip
# Whole models around a token stack of their own or of any family above.
WHOLES = {"llava": "LLaVA", "qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}


def family_names() -> list[str]:
    """Every family of the table, with the vision-language models whose text part may be of several."""
    return [*(family.name for family in FAMILIES), *(name for name in WHOLES.values() if name == "LLaVA")]


@dataclass(frozen=True)
class Split:
    """The parts of a projection's output ``(..., width)``.

    Attributes:
        roles: a role for each part.
        sizes: the width of each part.
        heads: 0: the parts stand one after the other. Else they are interleaved: the output is ``(..., heads, parts, size)``,
            each part ``heads * size`` wide.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class Decoder:
    """The part of a model that patches work on.

    Attributes:
        model: the model asked for, taken out of PEFT.
        family: its family.
        stack: the module whose forward takes the tokens, mask, positions and cache.
        path: the stack's name in ``model``; ``""``: it is the model.
        base: the stack, or the module that puts images and text together before it (``get_rope_index`` stands there).
    """

    model: Any
    family: Family
    stack: Any
    path: str
    base: Any

    @property
    def config(self) -> Any:
        """The configuration of the stack (the text configuration of a vision-language model)."""
        return self.stack.config

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        found: nn.ModuleList = self.stack.get_submodule(self.family.layers)
        return found

    def layer_path(self, index: int) -> str:
        """The name of a layer in ``model``, as ``ledger.swap_module(model, ...)`` takes it."""
        return ".".join(part for part in (self.path, self.family.layers, str(index)) if part)

    def layer_of(self, path: str) -> int | None:
        """The index of the layer a module of ``model`` belongs to."""
        head = ".".join(part for part in (self.path, self.family.layers) if part) + "."
        number = path[len(head) :].partition(".")[0] if path.startswith(head) else ""
        return int(number) if number.isdigit() else None

    def projections(self, index: int) -> Iterator[tuple[str, Any, Split]]:
        """``(path in model, module, its parts)`` of each projection of a layer."""
        layer = self.layers[index]
        for path, role in self.family.projections.items():
            module = layer.get_submodule(path)
            yield f"{self.layer_path(index)}.{path}", module, self._split(role, module)

    def _split(self, role: str, module: Any) -> Split:
        module = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # inside PEFT
        width = int(module.nf if self.family.conv1d else module.out_features)
        if "/" in role:
            roles, heads = tuple(role.split("/")), int(self.config.num_attention_heads)
            return Split(roles, (width // (heads * len(roles)),) * len(roles), heads)
        roles = tuple(role.split("|"))
        if len(roles) == 1:
            return Split(roles, (width,))
        heads = int(self.config.num_attention_heads)
        grouped = int(getattr(self.config, "num_key_value_heads", None) or heads)
        shares = {"q": heads, "k": grouped, "v": grouped}
        unit = width // sum(shares.get(r, 1) for r in roles)
        sizes = tuple(shares.get(r, 1) * unit for r in roles)
        if sum(sizes) != width:
            raise HfplugError(f"{type(module).__name__} of {width} outputs cannot hold the parts {roles} of {sizes}")
        return Split(roles, sizes)


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any, only: tuple[str, ...] | None = None) -> Decoder:
    """Find the decoder of a transformers model.

    Args:
        model: a transformers model, also inside PEFT.
        only: names of the families to allow; ``None``: all.

    Raises:
        UnsupportedError: a family the table does not hold, or that is not allowed; the message lists those that are.
    """
    whole = unwrapped(model)
    known = [name for name in family_names() if only is None or name in only]
    config = getattr(whole, "config", None)
    stack: Any = token_stack(whole)
    kind, own = (getattr(c, "model_type", None) for c in (config, getattr(stack, "config", None)))
    family = next((f for f in FAMILIES if own in f.model_types), None)
    composite = family is not None and kind != own
    name = WHOLES.get(str(kind)) if composite else getattr(family, "name", None)
    if family is None or name not in known:
        types = [t for f in FAMILIES for t in f.model_types] + list(WHOLES)
        raise UnsupportedError(
            f"{type(whole).__name__} (model_type {kind!r}{nearest(kind, types) if name is None else ''}) is of no family that "
            f"this patch knows; known: {', '.join(known)}"
        )
    path = next((n for n, m in whole.named_modules() if m is stack), None)
    if path is None:
        raise UnsupportedError(f"{type(whole).__name__}: its token stack {type(stack).__name__} is not part of it")
    base: Any = getattr(whole, "base_model", whole) if composite else stack
    return Decoder(whole, family, stack, path, base)


# -- whether the code is the one the table was written for ----------------------------------------------------------------


def check_proven(decoder: Decoder) -> None:
    """Compare what a patch replaces with what the table was written for: who wrote each forward, and what it reads.

    Raises:
        UnsupportedError: a forward replaced by somebody else (Liger, Hub kernels), a layer that no longer takes or reads what
            the table says.
    """
    family = decoder.family
    names = [family.attention, family.mlp, *family.norms, *family.head_norms]
    for index, layer in enumerate(decoder.layers):
        for name in ("", *(n for n in names if n)):
            _check_author(decoder, index, name, layer.get_submodule(name) if _has(layer, name) else None)
        _check_reads(decoder, index, layer, "", [*names, *family.projections])
        _check_reads(decoder, index, layer.get_submodule(family.attention), family.attention, [*family.projections])
        if family.mlp:
            _check_reads(decoder, index, layer.get_submodule(family.mlp), family.mlp, [*family.projections])
        parameters = parameter_names(layer)
        if parameters[:1] != ["hidden_states"] or "attention_mask" not in parameters:
            raise UnsupportedError(_unproven(decoder, index, "", f"its forward takes {parameters}"))


def _has(layer: Any, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True


def _check_author(decoder: Decoder, index: int, name: str, module: Any) -> None:
    if module is None:
        raise UnsupportedError(_unproven(decoder, index, name, "it is not there"))
    forward = vars(module).get("forward")
    if forward is not None and not hasattr(module, "_old_forward"):  # accelerate's dispatch only moves the inputs
        author = getattr(forward, "__module__", type(forward).__module__)
        raise UnsupportedError(_unproven(decoder, index, name, f"its forward was replaced by {author}"))
    author = inspect.unwrap(type(module).forward).__module__
    if not author.startswith(("transformers.", "torch.nn.")) or not type(module).__module__.startswith(
        ("transformers.", "torch.nn.")
    ):
        raise UnsupportedError(_unproven(decoder, index, name, f"its code is from {author}"))


def _check_reads(decoder: Decoder, index: int, module: Any, prefix: str, paths: list[str]) -> None:
    read = inspect.unwrap(type(module).forward).__code__.co_names
    for path in paths:
        head, _, last = path.rpartition(".")
        if path and head == prefix and last not in read:
            raise UnsupportedError(_unproven(decoder, index, prefix, f"its forward does not use {last!r}"))


def _unproven(decoder: Decoder, index: int, name: str, what: str) -> str:
    from hfplug.upstream import PROVEN

    module = decoder.layers[index]
    where = decoder.layer_path(index) + (f".{name}" if name else "")
    return (
        f"{where} ({type(module).__name__}) is not what patches of {decoder.family.name} models were written for (transformers "
        f"{PROVEN['transformers']}): {what}. Apply the patch before such changes, or pass force=True to go on at your own risk"
    )


__all__ = ["FAMILIES", "WHOLES", "Decoder", "Family", "Split", "check_proven", "decoder_of", "family_names", "unwrapped"]
