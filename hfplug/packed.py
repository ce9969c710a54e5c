"""A linear layer whose weight is stored in few bits: what every quantizer of a plugin puts in the place of ``nn.Linear``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hfplug.errors import HfplugError

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype."""


class PackedLinear(nn.Module):
    """``y = x·Ŵᵀ + b`` with ``Ŵ`` stored in few bits; base of the layer class of a quantizer.

    A subclass says which tensors there are (:meth:`layout`), makes them from a weight (:meth:`pack`) and gives the weight they
    stand for (:meth:`unpack`). Where it has a kernel, or quantises the input too, it overrides :meth:`product`. One tensor is
    called ``weight``, as in ``nn.Linear``, so that a checkpoint in full precision is found; its shape must be another than
    ``(out_features, in_features)`` for every size: stock transformers then refuses the file for its shapes, should it get as far.

    The gradient of the input is that of a linear layer with the weight ``Ŵ`` (exact, and straight-through where the input is
    quantised); the packed tensors have none. ``Ŵ`` is unpacked again in the backward pass: nothing of its size is kept.

    Args:
        in_features, out_features: sizes, as in ``nn.Linear``.
        bias: whether there is one, in full precision.
        config: the quantizer's configuration.
    """

    method: ClassVar[str]
    if TYPE_CHECKING:  # torch types every attribute of a module as Tensor | Module
        in_features: int
        out_features: int
        config: Any
        bias: Tensor | None

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, in_features: int, out_features: int, bias: bool, config: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.config = in_features, out_features, config
        layout = self.layout(out_features, in_features, config)
        if "weight" not in layout or layout["weight"][0] == (out_features, in_features):
            raise HfplugError(f"{type(self).__name__}.layout must have a 'weight' that cannot be taken for one of full precision")
        for name, (shape, dtype) in layout.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    @classmethod
    def layout(cls, out_features: int, in_features: int, config: Any) -> Layout:
        """Names, shapes and dtypes of the packed tensors of a weight ``(out_features, in_features)``."""
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: Tensor, config: Any) -> dict[str, Tensor]:
        """The tensors of :meth:`layout` for a weight ``(out_features, in_features)`` of any float dtype, on its device."""
        raise NotImplementedError

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """``Ŵ`` ``(out_features, in_features)`` in ``dtype``."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """``x·Ŵᵀ + b`` for ``x`` ``(..., in_features)``, in its dtype; called without gradients."""
        return nn.functional.linear(x, self.unpack(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @classmethod
    def execution(cls, config: Any) -> str:
        """``"native"`` or ``"emulated"``, a colon, and what happens in the forward, for the log."""
        return "emulated: weights are unpacked to the input's dtype in every forward"

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: Any) -> PackedLinear:
        """A layer with the weight and bias of ``linear``, on its device."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, linear.bias is not None, config)
        made.load(cls.pack(linear.weight.detach(), config))
        if linear.bias is not None:
            made.bias = linear.bias
        return made

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over packed tensors.

        Raises:
            HfplugError: names, shapes or dtypes are not those of :meth:`layout`.
        """
        layout = self.layout(self.out_features, self.in_features, self.config)
        found = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        if found != layout:
            raise HfplugError(f"{type(self).__name__}.pack made {found}, its layout is {layout}")
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, everything but the bias counted."""
        layout = self.layout(self.out_features, self.in_features, self.config).values()
        stored = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)
        return 8 * stored / (self.in_features * self.out_features)

    # By these names PEFT knows the size of a quantised layer; without them it warns of an unsupported one.
    @property
    def infeatures(self) -> int:
        return self.in_features

    @property
    def outfeatures(self) -> int:
        return self.out_features

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _Product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        sides = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sides}, {self.bits_per_weight:.3g} bits per weight"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, module: PackedLinear) -> Tensor:
        ctx.module, ctx.bias_dtype = module, None if bias is None else bias.dtype
        return module.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        to_x = grad @ ctx.module.unpack(grad.dtype) if ctx.needs_input_grad[0] else None
        to_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return to_x, to_bias, None


def packed_modules(model: nn.Module) -> dict[str, PackedLinear]:
    """Name -> module of every packed layer in a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
