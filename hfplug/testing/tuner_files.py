"""The half of the tuner contract that concerns files: save, reload on every route, resume, cards, missing plugins."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from hfplug.testing import models

# What a fresh process does with an adapter folder: load it on the routes users take, write the logits or the error of each.
_LOADER = """
import json, sys, warnings
folder, base, out, *first = sys.argv[1:]
warnings.simplefilter("ignore")
for name in first:
    __import__(name)
import torch
import peft
from transformers import AutoModelForCausalLM
def load_adapter():
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(folder)
    return model
routes = {
    "PeftModel": lambda: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder),
    "AutoPeftModel": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(folder),
    "AutoModel": lambda: AutoModelForCausalLM.from_pretrained(folder),
    "load_adapter": load_adapter,
}
batch, found = torch.load(out + ".batch"), {"types": [t.value for t in peft.PeftType]}
for name, route in routes.items():
    try:
        with torch.no_grad():
            found[name] = route().eval()(**batch).logits
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
torch.save(found, out)
"""


def assert_equal_states(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, what: str) -> None:
    """Same names, dtypes and values within ``tolerance`` (0: bit for bit)."""
    import torch

    assert sorted(found) == sorted(expected), f"{what}: other tensors: {sorted(set(found) ^ set(expected))[:3]}"
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, f"{what}: {name} is {found[name].dtype} instead of {value.dtype}"
        if tolerance == 0:
            assert torch.equal(found[name], value), f"{what}: {name} differs"
        else:
            difference = (found[name].double() - value.double()).abs().max().item()
            assert difference <= tolerance, f"{what}: {name} is off by {difference:.2e}"


class TunerFilesContract:
    """What every tuner keeps through files; part of :class:`hfplug.testing.tuner.TunerContract`."""

    method: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    dropout: ClassVar[dict[str, Any]] = {}
    merge: ClassVar[dict[str, Any] | None] = None
    identity_at_init: ClassVar[bool | Literal["evaluation"]] = True
    export: ClassVar[Literal["exact", "approximate"] | None] = None
    tolerance: ClassVar[float] = 1e-6

    # -- helpers; a subclass may replace them -------------------------------------------------------------------------

    def config(self, **options: Any) -> Any:
        """A configuration for a causal language model, adapting every linear module unless told otherwise."""
        import hfplug

        chosen = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **self.options, **options}
        return hfplug.tuners.config(type=self.method, **chosen)

    def wrap(self, model: Any, *, autocast: bool = True, **options: Any) -> Any:
        """The model with a fresh adapter, the same every time."""
        import peft
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return peft.get_peft_model(model, self.config(**options), autocast_adapter_dtype=autocast)

    def optimizer(self, model: Any) -> Any:
        """AdamW at a rate that moves a tiny model visibly."""
        import torch

        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def batch(self, rows: int = 2, length: int = 9, seed: int = 0, padded: bool = False) -> dict[str, Any]:
        """Token ids, and with ``padded`` the mask of a first row padded on the left."""
        import torch

        ids = torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
        if not padded:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        return {"input_ids": ids.masked_fill(mask == 0, models.PAD), "attention_mask": mask}

    def labels(self, batch: Mapping[str, Any]) -> Any:
        """The ids themselves, but for padding."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        return ids if mask is None else ids.masked_fill(mask == 0, -100)

    def train(self, model: Any, steps: int = 3, seed: int = 1) -> Any:
        """A few optimizer steps on padded batches; the mode of the model stays."""
        import torch

        mode, optimizer = model.training, self.optimizer(model)
        model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for step in range(steps):
                batch = self.batch(seed=100 * seed + step, padded=True)
                model(**batch, labels=self.labels(batch)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.train(mode)

    def trained(self, model: Any, **options: Any) -> Any:
        """The model with an adapter that a few steps have moved, weights and statistics."""
        return self.train(self.wrap(model, **options))

    def logits(self, model: Any, batch: Mapping[str, Any], training: bool = False) -> Any:
        """Without gradients; the mode of the model stays."""
        import torch

        mode = model.training
        try:
            with torch.no_grad():
                return model.train(training)(**batch).logits
        finally:
            model.train(mode)

    def state(self, model: Any, adapter: str = "default") -> dict[str, Any]:
        """Parameters and buffers of an adapter."""
        found = {n: t.detach().clone() for n, t in model.state_dict().items() if f".{self.method}_" in f".{n}"}
        return {n: t for n, t in found.items() if adapter in n.split(".")[-2:]}

    def load(self, folder: Path, base: Any, **options: Any) -> Any:
        """Through ``PeftModel``."""
        import peft

        return peft.PeftModel.from_pretrained(base, str(folder), **options)

    def saved(self, folder: Path) -> tuple[Any, Path, Path]:
        """A trained model whose base lies in a folder; the model, the folder of its adapter, that of its base."""
        from transformers import AutoModelForCausalLM

        models.tiny_llama().save_pretrained(folder / "base")
        model = self.trained(AutoModelForCausalLM.from_pretrained(folder / "base"))
        model.save_pretrained(folder / "adapter")
        return model, folder / "adapter", folder / "base"

    def loaded_in_a_process(self, adapter: Path, base: Path, *first: str, **environment: str) -> dict[str, Any]:
        """Logits of :meth:`batch`, or the error, on each route in a fresh process that imported ``first`` first."""
        import torch

        out = adapter.parent / f"loaded-{len(list(adapter.parent.glob('loaded-*')))}"
        torch.save(self.batch(), f"{out}.batch")
        command = [sys.executable, "-c", _LOADER, str(adapter), str(base), str(out), *first]
        subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True, text=True)
        return dict(torch.load(out))

    # -- reload -------------------------------------------------------------------------------------------------------

    @pytest.mark.slow  # a fresh process imports everything again
    def test_b01_a_fresh_process_loads_it_bit_for_bit(self, tmp_path: Path) -> None:
        """``import hfplug``, then every route; PEFT's enum of types and its file are as they were installed."""
        import base64
        import hashlib
        import importlib.metadata

        import torch

        model, adapter, base = self.saved(tmp_path)
        expected = self.logits(model.eval(), self.batch())
        found = self.loaded_in_a_process(adapter, base, "hfplug")
        types = found.pop("types")
        assert self.method.upper() not in types, "the enum PeftType was changed"
        for route, logits in found.items():
            assert not isinstance(logits, str), f"{route}: {logits}"
            assert torch.equal(logits, expected), f"{route}: off by {(logits - expected).abs().max():.2e}"
        file = next(f for f in importlib.metadata.files("peft") or () if str(f).endswith("peft/utils/peft_types.py"))
        digest = base64.urlsafe_b64encode(hashlib.sha256(Path(str(file.locate())).read_bytes()).digest()).decode().rstrip("=")
        assert file.hash is not None
        assert digest == file.hash.value, "peft_types.py was edited"

    @pytest.mark.slow  # a fresh process imports everything again
    def test_b03_without_the_plugin_an_error_says_what_to_install(self, tmp_path: Path) -> None:
        """hfplug imported, plugin disabled: plugin, distribution, version, install line. No hfplug: never plain LoRA."""
        import hfplug

        _, adapter, base = self.saved(tmp_path)
        source = hfplug.catalogue().get(self.method).source
        facts = json.loads((adapter / "adapter_config.json").read_text())["hfplug"]
        assert {k: facts[k] for k in ("plugin", "distribution", "version")} == {
            "plugin": self.method, "distribution": source.distribution, "version": source.version,
        }  # fmt: skip
        for fact in (self.method, source.distribution, source.version):
            assert fact in (adapter / "README.md").read_text(), f"the card does not say {fact!r}"
        found = self.loaded_in_a_process(adapter, base, "hfplug", HFPLUG_DISABLE=source.plugin)
        del found["types"]
        for route, error in found.items():
            assert isinstance(error, str), f"{route} loaded an adapter whose plugin is disabled"
            assert error.startswith("MissingPluginError"), f"{route}: {error}"
            for fact in (repr(self.method), source.distribution, source.version, "pip install"):
                assert fact in error, f"{route}: the error does not say {fact!r}: {error}"
        stock = self.loaded_in_a_process(adapter, base)
        del stock["types"]
        for route, error in stock.items():
            assert isinstance(error, str), f"without hfplug, {route} loaded the adapter as something else"
            assert self.method.upper() in error, f"without hfplug, {route}: {error}"

    def test_b50_two_adapters_keep_their_own_state(self, tmp_path: Path) -> None:
        """Each adapter's weights, statistics and counters, through safetensors, ``low_cpu_mem_usage`` and ``.bin``."""
        import torch

        base, batch = models.tiny_llama(), self.batch()
        model = self.trained(copy.deepcopy(base))
        first = self.state(model)
        model.add_adapter("b", self.config())
        model.set_adapter("b")
        self.train(model, steps=2, seed=8)
        assert_equal_states(self.state(model), first, 0, "after training another adapter")
        expected = {}
        for name in ("default", "b"):
            model.set_adapter(name)
            expected[name] = self.logits(model, batch)
        assert not torch.equal(expected["default"], expected["b"])
        for safe in (True, False):
            folder = tmp_path / str(safe)
            model.save_pretrained(folder, safe_serialization=safe)
            for low in (False, True):
                again = self.load(folder, copy.deepcopy(base), low_cpu_mem_usage=low)
                again.load_adapter(str(folder / "b"), "b", low_cpu_mem_usage=low)
                for name in ("default", "b"):
                    what = f"adapter {name!r}, safetensors={safe}, low_cpu_mem_usage={low}"
                    assert_equal_states(self.state(again, name), self.state(model, name), 0, what)
                    again.set_adapter(name)
                    assert torch.equal(self.logits(again, batch), expected[name]), f"{what}: other logits"

    def test_b50_statistics_survive_a_cast(self) -> None:
        """``model.to(bfloat16)`` and ``half()`` leave buffers (statistics, counters) as they are."""
        import torch

        for dtype in (torch.bfloat16, torch.float16):
            model = self.trained(models.tiny_llama())
            parameters = {name for name, _ in model.named_parameters()}
            before = {n: t for n, t in self.state(model).items() if n not in parameters}
            after = {n: t for n, t in self.state(model.to(dtype)).items() if n not in parameters}
            assert_equal_states(after, before, 0, f"after .to({dtype})")

    @pytest.mark.parametrize("fault", ["unexpected", "missing"])
    def test_b50_tensors_that_do_not_fit_are_an_error(self, tmp_path: Path, fault: str) -> None:
        """One tensor too many, or any one of an adapter's kinds of tensors too few, on every route."""
        import peft
        from safetensors.torch import load_file, save_file
        from transformers import AutoModelForCausalLM

        _, adapter, base = self.saved(tmp_path)
        file = adapter / "adapter_model.safetensors"
        stored = load_file(file)
        last = [name for name in stored if ".layers.1." in name and ".down_proj." in name]
        assert last, f"no tensors of the last layer's down_proj in {sorted(stored)[:3]}"

        def load_adapter() -> None:
            AutoModelForCausalLM.from_pretrained(base).load_adapter(str(adapter))

        routes: dict[str, Callable[[], Any]] = {
            "PeftModel": lambda: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)),
            "AutoModel": lambda: AutoModelForCausalLM.from_pretrained(adapter),
            "load_adapter": load_adapter,
        }
        for name in last:
            head, _, tail = name.rpartition(f".{self.method}_")
            wrong = {k: v for k, v in stored.items() if k != name}
            if fault == "unexpected":
                wrong = {**stored, f"{head}.{self.method}_stray_{tail}": stored[name].clone()}
            save_file(wrong, file, metadata={"format": "pt"})
            for route, load in routes.items():
                try:
                    load()
                except ValueError as error:
                    assert "down_proj" in str(error), f"{route}: the error does not name the tensor: {error}"  # noqa: PT017
                else:
                    pytest.fail(f"{route} loaded a checkpoint with {name} {fault}")

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_b51_modules_to_save_on_every_route(self, tmp_path: Path, tied: bool) -> None:
        """A head trained whole comes back on all routes, also where it was tied to the embedding."""
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        base, adapter, batch = tmp_path / "base", tmp_path / "adapter", self.batch()
        models.tiny_llama(tie_word_embeddings=tied).save_pretrained(base)
        model = self.trained(AutoModelForCausalLM.from_pretrained(base), modules_to_save=["lm_head"]).eval()
        fresh = models.tiny_llama(tie_word_embeddings=tied).lm_head.weight
        assert not torch.equal(model.get_base_model().lm_head.modules_to_save["default"].weight, fresh), "lm_head did not train"
        expected = self.logits(model, batch)
        model.save_pretrained(adapter)
        loaded = AutoModelForCausalLM.from_pretrained(base)
        loaded.load_adapter(str(adapter))
        routes = {
            "PeftModel": self.load(adapter, AutoModelForCausalLM.from_pretrained(base)),
            "AutoPeftModel": peft.AutoPeftModelForCausalLM.from_pretrained(adapter),
            "AutoModel": AutoModelForCausalLM.from_pretrained(adapter),
            "load_adapter": loaded,
        }
        for route, found in routes.items():
            assert torch.equal(self.logits(found.eval(), batch), expected), f"{route}: other logits"

    @pytest.mark.parametrize("adapters", [1, 2])
    def test_b52_resume_is_the_straight_run(self, tmp_path: Path, adapters: int) -> None:
        """4 steps == 2 + resume + 2: weights and statistics of every adapter, bit for bit."""
        from hfplug.optimization import prepare

        def trainer(folder: str) -> Any:
            model = self.wrap(models.tiny_llama(attention_dropout=0.1), **self.dropout)
            if adapters == 2:
                import torch

                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(7)
                    model.add_adapter("b", self.config())
            args: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "linear"}
            made = models.tiny_trainer(model, output_dir=tmp_path / folder, optim="adamw_torch", **args)
            prepare(made)
            return made

        straight = trainer("straight")
        straight.train()
        resumed = trainer("resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
        for name in ["default", "b"][:adapters]:
            found, expected = self.state(resumed.model, name), self.state(straight.model, name)
            assert_equal_states(found, expected, 0, f"adapter {name!r} after a resume")
        assert resumed.state.log_history[-2]["loss"] == straight.state.log_history[-2]["loss"]

    # -- what others read ---------------------------------------------------------------------------------------------

    def test_b53_the_card_names_no_local_path(self, tmp_path: Path) -> None:
        """Method, version, options, how to load; valid metadata; saved twice, the same."""
        from huggingface_hub import ModelCard
        from huggingface_hub.repocard import metadata_load

        import hfplug

        model, adapter, base = self.saved(tmp_path)
        card = (adapter / "README.md").read_text()
        assert str(tmp_path) not in card
        assert base.name not in str(metadata_load(adapter / "README.md"))
        entry = hfplug.catalogue().get(self.method)
        options = self.config(**self.options).to_dict()
        facts = [entry.method.paper.title, entry.source.version, "pip install", "import hfplug", "from_pretrained", "local"]
        for fact in facts + [f"| {name} | `{options[name]}` |" for name in self.options]:
            assert fact in card, f"the card does not say {fact!r}"
        data = ModelCard.load(adapter / "README.md").data.to_dict()
        assert "base_model" not in data
        assert data["library_name"] == "peft"
        assert not any(tag.startswith("base_model:") for tag in data.get("tags") or [])
        model.save_pretrained(adapter)
        assert (adapter / "README.md").read_text() == card, "saving again changed the card"
        hub = self.wrap(models.tiny_llama())
        hub.get_base_model().config._name_or_path = "some-org/some-model"
        hub.save_pretrained(tmp_path / "hub")
        assert ModelCard.load(tmp_path / "hub" / "README.md").data.base_model == "some-org/some-model"
        memory = self.wrap(models.tiny_llama())
        memory.save_pretrained(tmp_path / "memory")
        text = (tmp_path / "memory" / "README.md").read_text()
        assert "base_model" not in ModelCard.load(tmp_path / "memory" / "README.md").data.to_dict()
        assert "# Model Card" in text, "the card of a model without a name is garbled"

    @pytest.mark.slow  # a fresh process imports everything again
    def test_b55_export_to_a_plain_lora(self, tmp_path: Path) -> None:
        """In a process without hfplug it loads and answers the same; or the export is refused and writes nothing."""
        import peft
        from transformers import AutoModelForCausalLM

        import hfplug

        model, adapter, base = self.saved(tmp_path)
        out = tmp_path / "exported"
        if self.export != "exact":
            with pytest.raises(hfplug.UnsupportedError, match=self.method):
                hfplug.tuners.export(adapter, out)
            assert not out.exists()
            if self.export is None:
                return
        done = hfplug.tuners.export(adapter, out, base=base, approximate=self.export == "approximate", probe=self.batch())
        expected, own = self.logits(model.eval(), self.batch()), self.loaded_in_a_process(out, base)
        assert {t.split("_")[0] for t in own["types"]} >= {"LORA"}
        if self.export == "exact":
            assert done.approximation is None
            assert done.logit_error <= 1e-5
        for route in ("PeftModel", "AutoPeftModel", "AutoModel", "load_adapter"):
            assert not isinstance(own[route], str), f"{route}: {own[route]}"
            difference = (own[route] - expected).abs().max().item()
            assert abs(difference - done.logit_error) <= 1e-5, f"{route}: off by {difference:.2e}, not {done.logit_error:.2e}"
        plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        for name, parameter in plain.named_parameters():
            assert self.method not in name
            assert parameter.numel() > 0
        card = (out / "README.md").read_text()
        assert str(tmp_path) not in card
        assert hfplug.catalogue().get(self.method).method.paper.title in card
        with pytest.raises(hfplug.ConfigError, match="exists"):
            hfplug.tuners.export(adapter, out, base=base, approximate=True)
        with pytest.raises(hfplug.ConfigError, match="plain LoRA already"):
            hfplug.tuners.export(out, tmp_path / "twice")

    @pytest.mark.parametrize("autocast", [True, False], ids=["autocast_adapter_dtype", "as-the-base"])
    def test_b54_dtypes(self, tmp_path: Path, autocast: bool) -> None:
        """On a bfloat16 base: parameters fp32 or, without ``autocast_adapter_dtype``, bfloat16; so in the file, so reloaded.

        The forward works without autocast. transformers' own ``load_adapter`` has no such switch and takes the base's dtype.
        """
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        models.tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")

        def base() -> Any:
            return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)

        expected = torch.float32 if autocast else torch.bfloat16
        model = self.train(self.wrap(base(), autocast=autocast))
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {expected}
        logits = self.logits(model.eval(), self.batch())
        assert logits.dtype == torch.bfloat16
        assert torch.isfinite(logits).all()
        model.save_pretrained(tmp_path / "adapter")
        state = self.state(model)
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert sorted(str(t.dtype) for t in stored.values()) == sorted(str(t.dtype) for t in state.values())
        again = self.load(tmp_path / "adapter", base(), autocast_adapter_dtype=autocast)
        assert_equal_states(self.state(again), state, 0, "reloaded")
        assert torch.equal(self.logits(again.eval(), self.batch()), logits)
        other = self.load(tmp_path / "adapter", base(), autocast_adapter_dtype=not autocast)
        flipped = torch.bfloat16 if autocast else torch.float32
        assert {p.dtype for name, p in other.named_parameters() if name in names} == {flipped}
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.bfloat16)
        adapter = {p.dtype for name, p in plain.named_parameters() if f".{self.method}_" in name}
        assert adapter == {torch.bfloat16}
