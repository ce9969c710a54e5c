"""What the tests of ReToken and MoRT share: stirred models, tokens, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hfplug
from hfplug.families import decoder_of
from hfplug.modeling_patches.retoken.tables import TokenTable
from hfplug.testing.patch_models import FAMILIES

SOME = tuple(range(3, 40, 2))  # ids with rows, where not all have


def ids_of(rows: int = 2, length: int = 12, seed: int = 0, low: int = 3, high: int = 63) -> Tensor:
    return torch.randint(low, high, (rows, length), generator=torch.Generator().manual_seed(seed))


def made(method: str = "retoken", family: str = "Llama", stir: float = 0.5, build: Any = None, **options: Any) -> Any:
    model = (build or FAMILIES[family])().eval()
    handle = hfplug.apply(model, method, **options)
    if stir:
        stirred(model, handle, stir)
    return model


def stirred(model: Any, handle: Any, by: float = 0.5) -> None:
    generator, own = torch.Generator().manual_seed(7), {s.name for s in handle.plan.added}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **more).logits
    return found


def gradients(model: Any, *batches: Tensor) -> dict[str, Tensor]:
    """One backward after all forwards, as preference losses do."""
    model.zero_grad()
    sum(model(input_ids=ids, labels=ids).loss for ids in batches).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def holders(model: Any, method: str) -> list[Any]:
    return [getattr(layer, method) for layer in decoder_of(model).layers]


def stack_of(model: Any) -> Any:
    return decoder_of(model).stack


def tables(model: Any) -> list[TokenTable]:
    return [m for m in model.modules() if isinstance(m, TokenTable)]


OPTIONS: list[dict[str, Any]] = [{}, {"ids": SOME}, {"rank": 3, "norm": "rms"}, {"rank": 3, "ids": SOME, "eps": 0.1}]
