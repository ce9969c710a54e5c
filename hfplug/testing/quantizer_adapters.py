"""Adapters on packed layers, and the tools of the contract; part of :class:`hfplug.testing.quantizer.QuantizerContract`."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hfplug.testing import models

TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def lora(model: Any) -> Any:
    """The model with PEFT's LoRA, its weights drawn at random."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS))


class QuantizerAdapters:
    """PEFT's LoRA and tuners of plugins on a quantised base."""

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    quantises_inputs: ClassVar[bool] = False
    tuners: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"lora": lora}
    merging: ClassVar[str | None] = None

    def test_b44_gradients_are_those_of_the_dequantised_reference(self, tmp_path: Path) -> None:
        """Of every adapter weight and of the input embeddings, within 1e-6; then a step of training changes the logits.

        Where inputs are quantised too, the reference runs each layer on the quantised input, straight-through.
        """
        import torch

        _, whole = self.loaded(tmp_path)
        wide = torch.nn.Module.double(copy.deepcopy(whole))  # sums in another order do not count
        reference = self.reference(wide)
        for tuner in self.tuners:
            found, drawn = self.gradients(wide, tuner)
            for name, expected in self.gradients(reference, tuner, drawn)[0].items():
                scale = expected.abs().max().clamp(min=1e-12)
                assert (found[name] - expected).abs().max() / scale <= 1e-6, f"{tuner}: {name}"
            assert any(g.abs().max() > 0 for g in found.values())
            adapted = self.adapted(copy.deepcopy(whole), tuner)
            before = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
            stale = self.logits(adapted)
            optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
            self.loss(adapted).backward()
            optimizer.step()
            assert not torch.equal(self.logits(adapted), stale), tuner
            now = dict(adapted.named_parameters())
            assert all(torch.equal(now[n], p) for n, p in before.items()), f"{tuner}: a weight of the base has changed"

    def test_an_adapter_is_saved_and_loads_on_the_packed_base(self, tmp_path: Path) -> None:
        """The same logits, bit for bit; unloaded, the base is as before."""
        import peft
        import torch

        _, model = self.loaded(tmp_path)
        bare = self.logits(model)
        for tuner in self.tuners:
            adapted = self.adapted(copy.deepcopy(model), tuner)
            with self.quiet():
                adapted.save_pretrained(tmp_path / tuner)
                expected = self.logits(adapted)
                assert not torch.equal(expected, bare), tuner
                again = peft.PeftModel.from_pretrained(self.load(tmp_path / "full"), str(tmp_path / tuner)).eval()
                assert torch.equal(self.logits(again), expected), tuner
                assert torch.equal(self.logits(again.unload()), bare), tuner

    def test_all_linear_means_the_packed_layers(self, tmp_path: Path) -> None:
        """``target_modules="all-linear"`` finds them, a second adapter too; no warning of an unsupported layer."""
        import peft

        _, model = self.loaded(tmp_path)
        names = set(self.packed(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*[Uu]nsupported layer.*")
            adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
            assert set(adapted.peft_config["default"].target_modules) == names
            adapted.add_adapter("b", peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        assert set(adapted.peft_config["b"].target_modules) == names

    def test_b49_merging_is_refused_or_asked_for_measured_and_taken_back(self, tmp_path: Path) -> None:
        """PEFT's LoRA: refused, with the way out. A tuner of a plugin: by its flag, the difference told, undone bit for bit."""
        import torch

        from hfplug.errors import UnsupportedError

        _, model = self.loaded(tmp_path)
        bare = self.logits(model)
        adapted = self.adapted(model, "lora")
        logits = self.logits(adapted)
        with pytest.raises(UnsupportedError, match="dequantize"):
            adapted.merge_adapter()
        assert torch.equal(self.logits(adapted), logits)
        with pytest.raises(UnsupportedError, match="adapter"):
            model.dequantize()
        if self.merging is None:
            pytest.skip("no tuner given that merges")
        adapted = self.adapted(adapted.unload(), self.merging)
        logits = self.logits(adapted)
        with pytest.raises(UnsupportedError, match="merge_quantized"):
            adapted.merge_adapter()
        adapted.peft_config["default"].merge_quantized = True
        with pytest.warns(UserWarning, match=r"logits moved by up to [0-9.e-]+"):
            adapted.merge_adapter()
        assert not torch.equal(self.logits(adapted), logits)
        adapted.unmerge_adapter()
        assert torch.equal(self.logits(adapted), logits)
        assert torch.equal(self.logits(adapted.unload()), bare)

    def test_initialisations_that_read_the_weight_are_refused(self, tmp_path: Path) -> None:
        import peft

        from hfplug.errors import UnsupportedError

        _, model = self.loaded(tmp_path)
        for init in ("pissa", "olora", "orthogonal"):
            with pytest.raises(UnsupportedError, match=f"'{init}'.*'gaussian'"):
                peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, init_lora_weights=init))
        with pytest.raises(ValueError, match="use_dora"):
            peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, use_dora=True))

    def test_the_trainer_takes_it(self, tmp_path: Path) -> None:
        """A stock ``Trainer``: refused without an adapter, trained with one; the same with gradient checkpointing."""
        import torch

        results = []
        for checkpointing in (False, True):
            _, model = self.loaded(tmp_path)
            if not checkpointing:
                with pytest.raises(ValueError, match="purely quantized"):
                    models.tiny_trainer(model)
            adapted = self.adapted(model, "lora")
            with self.quiet():
                trainer = models.tiny_trainer(adapted, max_steps=2, gradient_checkpointing=checkpointing)
                before = self.logits(adapted)
                trainer.train()
            results.append(self.logits(adapted))
            assert not torch.equal(results[-1], before)
        assert (results[0] - results[1]).abs().max() <= 1e-6 * results[0].abs().max()

    # -- tools --------------------------------------------------------------------------------------------------------

    def config(self, **options: Any) -> Any:
        """The configuration under test."""
        from hfplug.method import Kind
        from hfplug.options import build
        from hfplug.plugins import catalogue

        return build(catalogue().get(self.method, Kind.QUANTIZER).load_config(), {**self.options, **options})

    def linear_cls(self) -> Any:
        """The layer class of the method."""
        from hfplug.method import Kind
        from hfplug.plugins import load

        return load(self.method, Kind.QUANTIZER).linear_cls

    def loaded(self, tmp_path: Path, family: str = "llama", *, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
        """A tiny model in full precision, saved in ``tmp_path / "full"``, and what is loaded from there quantised."""
        import torch

        stock = models.TINY_MODELS[family](**options).to(getattr(torch, dtype)).eval()
        with self.quiet():
            stock.save_pretrained(tmp_path / "full")
            return stock, self.load(tmp_path / "full", dtype=dtype)

    def load(self, folder: Path, quantization_config: Any = ..., **options: Any) -> Any:
        """``from_pretrained``, with the configuration under test unless another is given."""
        from transformers import AutoModelForCausalLM

        asked = self.config() if quantization_config is ... else quantization_config
        with self.quiet():
            return AutoModelForCausalLM.from_pretrained(
                folder, **({} if asked is None else {"quantization_config": asked}), **options
            )

    @staticmethod
    def packed(model: Any) -> dict[str, Any]:
        """Name -> packed layer."""
        from hfplug.packed import packed_modules

        return dict(packed_modules(model))

    @staticmethod
    def plain(module: Any, dtype: str = "float32") -> Any:
        """The ordinary layer of a packed one."""
        import torch

        from hfplug.seams.quantizer import plain_linear

        return plain_linear(module, getattr(torch, dtype))

    def reference(self, model: Any) -> Any:
        """An ordinary model in fp64 that computes the same; where inputs are quantised, override :meth:`rounded`."""
        import torch

        class Rounded(torch.nn.Linear):
            def forward(module, x: Any) -> Any:  # noqa: N805
                return torch.nn.functional.linear(x + (self.rounded(x) - x).detach(), module.weight, module.bias)

        made = copy.deepcopy(model)
        for name, module in self.packed(made).items():
            linear = self.plain(module, "float64")
            linear.__class__ = Rounded
            made.set_submodule(name, linear)
        return made

    def rounded(self, x: Any) -> Any:
        """The input of a packed layer as the layer uses it."""
        return x

    def adapted(self, model: Any, tuner: str) -> Any:
        """A tuner on the attention's and the MLP's layers, with weights that do something."""
        import torch

        with torch.random.fork_rng(devices=[]), self.quiet():
            torch.manual_seed(3)
            return self.tuners[tuner](model).eval()

    def gradients(self, model: Any, tuner: str, drawn: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gradients of an adapter's weights and of the embeddings, of a copy in fp64, and those weights.

        Args:
            model: the base.
            tuner: which adapter.
            drawn: weights of the adapter, in place of new ones: what is drawn depends on the dtype.
        """
        import torch

        adapted = torch.nn.Module.double(self.adapted(copy.deepcopy(model), tuner))
        trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, value in (drawn or {}).items():
                trained[name].copy_(value)
        adapted.get_input_embeddings().weight.requires_grad_(True)
        self.loss(adapted).backward()
        return {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}, trained

    def loss(self, model: Any) -> Any:
        """The loss on a batch, nothing drawn at random."""
        import torch

        batch = models.PadTo()([models.tiny_lm_dataset(4)[i] for i in range(4)])
        torch.manual_seed(0)
        return model(**batch).loss

    def logits(self, model: Any) -> Any:
        """Logits on a batch of two rows."""
        import torch

        ids = (torch.arange(26) * 7 % (models.VOCAB - 3) + 3).view(2, 13)
        with torch.no_grad():
            torch.manual_seed(0)
            return model.eval()(input_ids=ids).logits

    @staticmethod
    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        """Without the warnings of transformers and PEFT."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
