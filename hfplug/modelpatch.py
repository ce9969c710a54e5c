"""What a patch of a model is: the base classes a method author writes against, and the ledger that counts what was touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hfplug.families import Decoder
from hfplug.ledger import Ledger

WORKS_WITH = ("peft", "quantized", "optimizer")


@dataclass(frozen=True)
class ModelPatch:
    """Base of every patch: a frozen dataclass whose fields are its options, kept in ``config.json``.

    A subclass sets ``method`` and writes :meth:`apply`. Options must survive JSON.

    Attributes:
        method: the name in the catalogue.
        families: names of the families it knows (:mod:`hfplug.families`); ``None``: all of the table.
        identity: whether a freshly patched model gives the logits it gave before, bit for bit.
        works_with: of :data:`WORKS_WITH`, what may be on the model already: an adapter, quantised weights, or an optimizer
            that was made from its parameters (only patches that add or remove parameters are refused for that).
    """

    method: ClassVar[str]
    families: ClassVar[tuple[str, ...] | None] = None
    identity: ClassVar[bool] = False
    works_with: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Change the structure of a model, through the ledger alone.

        Runs on live models and on models without data (device ``meta``): for a plan, and inside ``from_pretrained`` before the
        weights are loaded. So it never reads values of weights, and makes tensors on the device and in the dtype of their
        neighbours. ``model`` may be the whole model or the part of it that :func:`hfplug.families.decoder_of` starts from;
        reach everything through ``decoder_of(model)``. Hooks are bound methods or ``functools.partial`` of one, never closures
        over modules: a deep copy of the model copies its patches, and a closure would go on meaning the original.

        Raises:
            UnsupportedError: this model cannot be patched; whatever was changed is taken back.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply()")

    def layers(self, decoder: Decoder) -> Iterable[int]:
        """Indices of the layers :meth:`apply` has to touch; all, unless the method says otherwise."""
        return range(len(decoder.layers))

    def start(self, model: nn.Module) -> None:
        """Set values of what :meth:`apply` added that depend on the model's weights; only on a live model, after ``apply``."""

    def init_weights(self, model: nn.Module) -> None:
        """Initialise weights of a model built from its configuration alone; runs after transformers' own initialisation."""

    def notes(self, decoder: Decoder) -> Sequence[str]:
        """Sentences for the plan: what the patch costs, what it presumes."""
        return ()

    def warnings(self, decoder: Decoder) -> Sequence[str]:
        """Sentences to say aloud when the patch is applied to a live model."""
        return ()


class PatchModule(nn.Module):
    """Base of a module that a patch adds: transformers initialises it by :meth:`reset_parameters`, not by guesses.

    A module put in the place of a linear one whose output is not linear in its weight any more sets ``merge_refused`` to the
    reason why an adapter on it cannot be merged; merging such an adapter is then refused.
    """

    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its first value.

        Called where a checkpoint lacks some of them. Use functions of ``torch.nn.init`` or ``transformers.initialization``:
        inside transformers they leave alone the tensors that were loaded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset_parameters()")


@dataclass(frozen=True)
class Touch:
    """One change to a module.

    Attributes:
        kind: ``"swap"``, ``"add"``, ``"hook"`` or ``"set"``.
        module: the module changed: the parent of a swapped or added one.
        name: of the child or attribute, or the kind of hook.
        former: class name of the module that was there.
        new: the module put there.
        old: the module that was there, of a swap.
        shared: name of a parameter or buffer of ``old`` -> its name in ``new``, which holds the same object.
        dtypes: dtypes of the other parameters of ``module`` at that time, from which ``old`` learns where the model has gone.
    """

    kind: str
    module: nn.Module
    name: str
    former: str = ""
    new: nn.Module | None = None
    old: nn.Module | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def tensors_of(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module by name; one that is shared stands under each of its names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


class PatchLedger(Ledger):
    """A ledger that remembers which modules it changed, for the plan and for the check that the new code runs."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.touches: list[Touch] = []

    def swap_module(self, root: nn.Module, path: str, new: nn.Module) -> nn.Module:
        """As :meth:`Ledger.swap_module`."""
        former = super().swap_module(root, path, new)
        head, _, name = path.rpartition(".")
        parent = root.get_submodule(head)
        theirs = {id(t): n for n, t in tensors_of(new)}
        shared = {n: theirs[id(t)] for n, t in tensors_of(former) if id(t) in theirs}
        dtypes = {n: p.dtype for n, p in parent.named_parameters() if p.is_floating_point() and not n.startswith(f"{name}.")}
        self.touches.append(Touch("swap", parent, name, type(former).__name__, new, former, shared, dtypes))
        return former

    def add_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """As :meth:`Ledger.add_module`."""
        super().add_module(parent, name, module)
        self.touches.append(Touch("add", parent, name, new=module))

    def hook(self, module: nn.Module, kind: str, fn: Callable[..., Any], **kwargs: Any) -> Any:
        """As :meth:`Ledger.hook`."""
        handle = super().hook(module, kind, fn, **kwargs)
        self.touches.append(Touch("hook", module, kind))
        return handle

    def set_attr(self, target: Any, name: str, value: Any) -> None:
        """As :meth:`Ledger.set_attr`."""
        super().set_attr(target, name, value)
        if isinstance(target, nn.Module):
            self.touches.append(Touch("set", target, name))


__all__ = ["WORKS_WITH", "ModelPatch", "PatchLedger", "PatchModule", "Touch", "tensors_of"]
