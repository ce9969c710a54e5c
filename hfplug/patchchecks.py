"""What has to hold before and after a patch: the model is in a state that can be patched, and the new code runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfplug.errors import ConfigError, HfplugError, UnsupportedError
from hfplug.families import Decoder
from hfplug.modelpatch import ModelPatch, Touch
from hfplug.probing import evaluating, probe_ids

_FIRST = "apply the patch first, then"


def check_state(model: Any, patch: ModelPatch) -> None:
    """Refuse a model that cannot be patched as it is, saying what to do in which order.

    Raises:
        ConfigError: no transformers model.
        UnsupportedError: compiled, wrapped, sharded, quantised, or with an adapter, unless the patch works with it.
    """
    name, kind = patch.method, type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.80} must be a transformers model")
    compiled = type(model).__module__.startswith("torch._dynamo") or any(
        getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()
    )
    if compiled:
        raise UnsupportedError(f"{name}: the model is compiled, and would go on with the code from before; {_FIRST} compile")
    if isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == "FullyShardedDataParallel":
        raise UnsupportedError(f"{name}: the model is wrapped in {kind}; {_FIRST} wrap it")
    if not hasattr(model, "config"):
        raise ConfigError(f"model={kind} must be a transformers model, which has a configuration")
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise UnsupportedError(f"{name}: the model's parameters are sharded (FSDP2, tensor parallelism); {_FIRST} shard it")
    if "peft" not in patch.works_with and _adapted(model):
        raise UnsupportedError(f"{name}: the model has a PEFT adapter, whose layers would hide what is replaced; {_FIRST} PEFT")
    if "quantized" not in patch.works_with and (
        getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None
    ):
        raise UnsupportedError(f"{name}: the model is quantised, and the patch works on full-precision weights alone")


def _adapted(model: nn.Module) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return True
    return tuners is not None and any(isinstance(m, tuners.BaseTunerLayer) for m in model.modules())


def optimizers_of(model: nn.Module) -> list[str]:
    """Class names of the optimizers alive in this process that hold parameters of the model."""
    own = {id(p) for p in model.parameters()}
    # By type(): asking a proxy for its __class__ may import or raise.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
    return [type(o).__name__ for o in found if any(id(p) in own for group in o.param_groups for p in group["params"])]


def check_alive(name: str, decoder: Decoder, touches: Sequence[Touch]) -> None:
    """Run one short forward and see that every swapped or changed module is called.

    Without data (device ``meta``) or token embeddings nothing can run, and nothing is checked.

    Raises:
        UnsupportedError: something that was put into a layer is never called.
    """
    model = decoder.base
    ids = probe_ids(decoder.stack, 1, 4)
    if ids is None or any(p.is_meta for p in model.parameters()):
        return
    names = {id(m): n for n, m in decoder.model.named_modules()}
    watched = {id(m): m for t in touches if t.kind != "add" for m in [t.new if t.kind == "swap" else t.module] if m is not None}
    called: set[int] = set()

    def seen(module: nn.Module, args: Any) -> None:
        called.add(id(module))

    handles = [m.register_forward_pre_hook(seen) for m in watched.values()]
    kept = {k: v for k, v in vars(model).items() if k not in ("_modules", "_parameters", "_buffers")}
    try:
        with evaluating(model), torch.random.fork_rng(devices=[]):
            output = model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for key in set(vars(model)) - set(kept) - {"_modules", "_parameters", "_buffers"}:
            del vars(model)[key]
        vars(model).update(kept)  # rope_deltas of a vision-language model, and the like
    layers = {i for key in watched if (i := decoder.layer_of(names.get(key, ""))) is not None}
    idle = {key for key in watched if key not in called}
    dead = {i for key in idle if (i := decoder.layer_of(names.get(key, ""))) is not None}
    if idle:
        first = min(names.get(key, "?") for key in idle)
        raise UnsupportedError(
            f"{name} patched {len(layers - dead)} of {len(layers)} layers of {type(decoder.model).__name__}: "
            f"{first!r} is not called by the model's forward"
        )
    hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
    if hidden is None or hidden.shape[:2] != ids.shape:
        raise HfplugError(f"{name}: the patched {type(model).__name__} returned no hidden states for each of its tokens")


__all__ = ["check_alive", "check_state", "optimizers_of"]
