"""Models and comparisons that the contract of model patches is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from hfplug.testing.patch_models import FAMILIES, families_of
from hfplug.testing.runs import Runs, off

if TYPE_CHECKING:
    from torch import Tensor

    from hfplug.patches import Patched


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value expected (at least 1)."""
    return off(found, expected) / max(1.0, float(expected.abs().max()))


def portrait(model: Any) -> dict[str, Any]:
    """Everything a patch may leave behind: modules, tensors, hooks and attributes, by identity; what is in the configuration."""
    out: dict[str, Any] = {"config": model.config.to_dict(), "keys": list(model.state_dict())}
    for name, module in model.named_modules():
        out[f"module {name}"] = (id(module), type(module), module.training)
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers"):
                out[f"{key} {name}"] = [(k, id(v)) for k, v in value.items()]
            elif "_hooks" in key and isinstance(value, dict):
                out[f"{key} {name}"] = [id(v) for v in value.values()]
            else:
                out[f"attribute {name}.{key}"] = id(value)
    out["trainable"] = [(n, p.requires_grad, p.dtype, p.device) for n, p in model.named_parameters()]
    return out


class PatchRuns(Runs):
    """What :class:`~hfplug.testing.patch.PatchContract` runs; its attributes are described there."""

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    families: ClassVar[tuple[str, ...]] = tuple(FAMILIES)
    compiles: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    embeds: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-6

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Collect each test that is ``over`` families for those of the class; pytest calls this."""
        chosen = families_of(metafunc.function, self.families)
        if chosen is not None:
            metafunc.parametrize("family", chosen)

    @property
    def target(self) -> Any:
        """The class of the patch."""
        from hfplug.method import Kind
        from hfplug.plugins import load

        return load(self.method, Kind.PATCH)

    def stock(self, family: str = "Llama") -> Any:
        """A model without the patch; where a class leaves ``families`` open, a family that its patch does not know is skipped."""
        allowed = self.target.families
        if allowed is not None and family not in allowed:
            pytest.skip(f"{self.method} knows {allowed}")
        return FAMILIES[family]().eval()

    def known(self) -> str:
        """A family that is tested and that the patch knows, Llama if possible."""
        allowed = self.target.families
        found = [f for f in self.families if allowed is None or f in allowed]
        return "Llama" if "Llama" in found else found[0]

    def batch(self, family: str) -> dict[str, Any]:
        """Inputs on which the patch acts; a patch that only images concern gives some here."""
        return self.padded("left")

    def apply(self, model: Any, **options: Any) -> Patched:
        """The patch on a model, with the options of the contract; its warnings are not what is tested."""
        import warnings

        import hfplug

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle: Patched = hfplug.apply(model, self.method, **{**self.options, **options})
        return handle

    def stir(self, model: Any, handle: Patched) -> None:
        """Give what the patch added other values than its first ones, so that it acts: random, the same every time."""
        import torch

        generator = torch.Generator().manual_seed(7)
        own = {s.name for s in handle.plan.added if s.parameter}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in own:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.2 * noise.to(parameter.dtype))

    def patched(self, family: str = "Llama", **options: Any) -> Any:
        """A model with the patch, acting."""
        model = self.stock(family)
        handle = self.apply(model, **options)
        self.stir(model, handle)
        return model

    def exact(self, family: str) -> Any:
        """:meth:`patched` with weights in fp64; in fp32 for eager attention, whose masks fp64 turns into NaN."""
        model = self.patched(family)
        return model if model.config._attn_implementation == "eager" else model.double()

    def same(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Equal but for the order of sums."""
        difference = relative(found, expected)
        assert difference <= self.tolerance, f"{what}: {difference:.2e}"

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without transformers' reports and bars."""
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(level)
