"""Taking a patch off a model that went on living with it: was anything put over it, and are the modules that return usable?

Modules that a patch exchanged stand outside the model meanwhile. ``model.to(...)``, ``from_pretrained`` and
``load_state_dict(assign=True)`` do not reach them, so what they share with the modules in their place is handed over, and the
rest follows the model to its device and dtype.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfplug.errors import LedgerError
from hfplug.modelpatch import Touch, tensors_of


def check_on_top(name: str, touches: Sequence[Touch]) -> None:
    """Refuse to take a patch off whose modules were wrapped or replaced since.

    Raises:
        LedgerError: another module stands where the patch put its own: an adapter, which would be lost without a word. Or
            accelerate spread the model over devices, and its hooks on the patch's modules, which fetch weights, would be lost.
    """
    for touch in touches:
        here = touch.module._modules.get(touch.name) if touch.new is not None else None
        if touch.kind == "swap" and hasattr(here, "_hf_hook"):
            raise LedgerError(
                f"{name}: {touch.name!r} of {type(touch.module).__name__} has accelerate's hooks (device_map, offloading), which "
                "would be lost; load the model on one device to take the patch off"
            )
        if here is not None and here is not touch.new and type(here) is not type(touch.new):
            found = f"{type(here).__module__}.{type(here).__name__}"
            raise LedgerError(
                f"{name}: {touch.name!r} of {type(touch.module).__name__} is a {found} now, put over the patch's "
                f"{type(touch.new).__name__}, and would be lost; take it off first (PEFT: unload() or merge_and_unload())"
            )


def swapped(touches: Sequence[Touch]) -> list[tuple[Touch, nn.Module]]:
    """The exchanged modules with what stands in their place now; to be asked before the patch comes off."""
    found = [(t, t.module._modules.get(t.name)) for t in touches if t.kind == "swap"]
    return [(touch, here) for touch, here in found if here is not None]


@torch.no_grad()
def settle(method: str, stack: Any, exchanged: Sequence[tuple[Touch, nn.Module]]) -> None:
    """Give the modules that came back the weights, device and dtype the model has now.

    What a checkpoint of the patched model did not hold gets the first values that transformers gives it, and this is said.

    Args:
        method: name of the patch, for the message.
        stack: the token stack, a transformers model, which knows how its modules are initialised.
        exchanged: from :func:`swapped`.
    """
    for touch, here in exchanged:
        for mine, theirs in touch.shared.items():
            _put(touch.old, mine, _get(here, theirs))
    outside = {id(tensor) for t, _ in exchanged for path, tensor in tensors_of(t.old) if path not in t.shared}
    fresh: dict[int, tuple[nn.Module, str]] = {}
    for touch, _ in exchanged:
        inside = ((n, p) for n, p in touch.module.named_parameters() if n in touch.dtypes and id(p) not in outside)
        whole = (("", p) for p in stack.parameters() if id(p) not in outside)
        path, anchor = next(itertools.chain(inside, whole), ("", None))
        if anchor is None or anchor.is_meta:
            continue
        for name, tensor in tensors_of(touch.old):
            if name in touch.shared:
                continue
            dtype = anchor.dtype if tensor.dtype == touch.dtypes.get(path) else tensor.dtype
            if tensor.is_meta:
                empty = torch.empty_like(tensor, dtype=dtype, device=anchor.device)
                _put(touch.old, name, nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty)
                owner = _owner(touch.old, name)
                fresh[id(owner)] = owner, touch.name
            elif (tensor.dtype, tensor.device) != (dtype, anchor.device):
                tensor.data = tensor.data.to(dtype=dtype, device=anchor.device)
    for owner, _ in fresh.values():
        stack._init_weights(owner)
    if fresh:
        kinds = ", ".join(sorted({child for _, child in fresh.values()}))
        warnings.warn(
            f"{method}: {len(fresh)} modules that came back ({kinds}) were in no checkpoint of the patched model; they have the "
            "first values that transformers gives them",
            stacklevel=3,
        )


def _owner(module: Any, path: str) -> Any:
    return module.get_submodule(path.rpartition(".")[0])


def _get(module: Any, path: str) -> Any:
    return getattr(_owner(module, path), path.rpartition(".")[2])


def _put(module: Any, path: str, tensor: Any) -> None:
    owner, last = _owner(module, path), path.rpartition(".")[2]
    table = owner._parameters if last in owner._parameters else owner._buffers
    if table[last] is not tensor:
        table[last] = tensor


__all__ = ["check_on_top", "settle", "swapped"]
