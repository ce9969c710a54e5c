"""The part of the contract of model patches that concerns files, configurations and adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from hfplug.testing.patch_models import FAMILIES, over
from hfplug.testing.patch_runs import PatchRuns, relative

# A process that has never heard of hfplug; on a folder that a patched model was saved in.
_STOCK = """
import sys, transformers
folder, cls = sys.argv[1:]
for load in (transformers.AutoModel, getattr(transformers, cls)):
    try:
        load.from_pretrained(folder)
    except Exception as error:
        assert "pip install" in str(error) and "hfplug" in str(error), error
    else:
        raise SystemExit(f"{load.__name__} loaded the folder without a word")
assert not [name for name in sys.modules if name.startswith("hfplug")]
transformers.AutoConfig.from_pretrained(folder)
print("REFUSED")
"""

# A process that imports hfplug first, and model code only when it loads.
_FRESH = """
import sys
import hfplug, transformers
assert "torch" not in sys.modules
folder, cls = sys.argv[1:]
base = transformers.AutoModel.from_pretrained(folder)
model = getattr(transformers, cls).from_pretrained(folder)
import torch
torch.set_num_threads(1)
batch, expected = torch.load(folder + "/expected.pt")
with torch.no_grad():
    assert torch.equal(model(**batch).logits, expected)
assert len(hfplug.applied(base)) == len(hfplug.applied(model)) == 1
print("THE SAME")
"""


class PatchFiles(PatchRuns):
    """Saving and loading."""

    @over(FAMILIES)
    def test_b50_a_reloaded_model_is_the_model(self, family: str, tmp_path: Path) -> None:
        """The same bits, no key missing or left over, with every class that loads the folder; removed, it is a stock model."""
        import torch
        import transformers

        import hfplug

        model, batch = self.patched(family), self.batch(family)
        expected = self.logits(model, batch)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
            again, info = type(model).from_pretrained(tmp_path / "a", output_loading_info=True)
            base = transformers.AutoModel.from_pretrained(tmp_path / "a")
            assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
            assert torch.equal(self.logits(again, batch), expected)
            assert again.config.hfplug == model.config.hfplug
            for loaded in (again, base):
                assert [h.method for h in hfplug.applied(loaded)] == [self.method]
            assert list(base.state_dict()) == list(model.base_model.state_dict())
            kept = model.base_model.state_dict()
            assert all(torch.equal(tensor, kept[name]) for name, tensor in base.state_dict().items())
            again.save_pretrained(tmp_path / "b")
        first, second = tmp_path / "a", tmp_path / "b"
        assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
        one, other = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
        for key in ("hfplug", "transformers_weights"):
            assert one[key] == other[key]
        stock, trained = self.stock(family), model.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the files could not hold has its first values
            hfplug.applied(again)[0].remove()
        assert list(again.state_dict()) == list(stock.state_dict())
        assert not hasattr(again.config, "hfplug")
        untrained = stock.state_dict()
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, trained.get(name, untrained[name])), f"{name} is not what was loaded"
        assert self.logits(again, batch).isfinite().all()

    def test_b50_low_precision_survives(self, tmp_path: Path) -> None:
        """bf16 weights, saved and loaded: the same bits."""
        import torch

        family = self.known()
        whole, batch = self.patched(family), {"input_ids": self.ids()}
        with self.quiet():
            whole.save_pretrained(tmp_path / "a")
            load: Any = type(whole).from_pretrained
            model = load(tmp_path / "a", dtype=torch.bfloat16)
            model.save_pretrained(tmp_path / "b")
            again, wide = load(tmp_path / "b"), load(tmp_path / "b", dtype=torch.float32)
        assert {p.dtype for p in again.parameters()} == {p.dtype for p in model.parameters()}
        assert torch.equal(self.logits(again, batch), self.logits(model, batch))
        assert {p.dtype for p in wide.parameters()} == {torch.float32}

    @pytest.mark.slow  # a fresh process imports everything again
    def test_a_folder_without_hfplug_is_refused(self, tmp_path: Path) -> None:
        """A stock process cannot load it, and the error says what to install."""
        model = self.patched(self.known())
        with self.quiet():
            model.save_pretrained(tmp_path)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HFPLUG_")}
        command = [sys.executable, "-c", _STOCK, str(tmp_path), type(model).__name__]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
        assert "REFUSED" in done.stdout, done.stdout + done.stderr

    @pytest.mark.slow  # a fresh process imports everything again
    def test_b01_a_fresh_process_loads_the_model(self, tmp_path: Path) -> None:
        """By an Auto class first, which reads the configuration before any model code is there: the same bits."""
        import torch

        family = self.known()
        model, batch = self.patched(family), self.batch(family)
        with self.quiet():
            model.save_pretrained(tmp_path)
        torch.save((batch, self.logits(model, batch)), tmp_path / "expected.pt")
        command = [sys.executable, "-c", _FRESH, str(tmp_path), type(model).__name__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "THE SAME" in done.stdout, done.stdout + done.stderr

    def test_b03_a_folder_without_the_plugin_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """hfplug without this plugin: the error says which plugin wrote the model and how to install it."""
        from hfplug.errors import ConfigError, MissingPluginError
        from hfplug.plugins import catalogue

        model = self.patched(self.known())
        with self.quiet():
            model.save_pretrained(tmp_path)
            entry = catalogue().entries[self.method]
            monkeypatch.delitem(catalogue().entries, self.method)
            with pytest.raises(MissingPluginError, match=self.method) as caught:
                type(model).from_pretrained(tmp_path)
            assert entry.source.distribution in str(caught.value)
            monkeypatch.undo()
            text = (tmp_path / "config.json").read_text()
            (tmp_path / "config.json").write_text(text.replace('"options": {', '"options": {"nonsense": 1, ', 1))
            with pytest.raises(ConfigError, match="nonsense"):
                type(model).from_pretrained(tmp_path)

    @over(FAMILIES)
    def test_a_configuration_builds_the_structure(self, family: str, tmp_path: Path) -> None:
        """``from_config`` of a recorded configuration: a patched, initialised, trainable model; without data on ``meta``."""
        import torch
        import transformers

        import hfplug

        model = self.patched(family)
        model.config.save_pretrained(tmp_path)
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        torch.manual_seed(0)
        built = type(model)._from_config(config)
        assert list(built.state_dict()) == list(model.state_dict())
        assert [h.patch for h in hfplug.applied(built)] == [h.patch for h in hfplug.applied(model)]
        assert self.logits(built.eval(), {"input_ids": self.ids()}).isfinite().all()
        gradients = self.gradients(built.train(), {"input_ids": self.ids()})
        assert all(g.isfinite().all() for g in gradients.values())
        with torch.device("meta"):
            empty = type(model)._from_config(config)
        assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}

    def test_a_stock_checkpoint_fills_a_recorded_configuration(self, tmp_path: Path) -> None:
        """What the checkpoint lacks gets its first values, never what the memory held."""
        import torch

        import hfplug

        family = self.known()
        model, stock = self.stock(family), self.stock(family)
        self.apply(model)
        with self.quiet():
            stock.save_pretrained(tmp_path)
            loaded = type(model).from_pretrained(tmp_path, config=model.config)
        assert len(hfplug.applied(loaded)) == 1
        for stored in hfplug.applied(model)[0].plan.added:
            if stored.parameter and self.target.identity:
                assert torch.equal(loaded.get_parameter(stored.name), model.get_parameter(stored.name)), stored.name
            elif stored.parameter:
                assert loaded.get_parameter(stored.name).isfinite().all(), stored.name
        batch = {"input_ids": self.ids()}
        if self.target.identity:
            assert torch.equal(self.logits(loaded, batch), self.logits(stock, batch))

    def test_peft_on_top(self, tmp_path: Path) -> None:
        """LoRA on the patched model trains, reloads on its like, is refused elsewhere; merging is exact or refused."""
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model

        from hfplug.errors import UnsupportedError

        family, batch = self.known(), {"input_ids": self.ids()}
        model = self.patched(family)
        with self.quiet():
            model.save_pretrained(tmp_path / "base")
        bare = self.logits(model, batch)
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        adapted = get_peft_model(model, config)
        expected = self.logits(adapted.eval(), batch)
        assert (expected - bare).abs().max() > 1e-3
        adapted(**batch, labels=batch["input_ids"]).loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in adapted.named_parameters() if "lora_" in n)
        adapted.save_pretrained(tmp_path / "adapter")
        with self.quiet():
            load: Any = type(self.stock(family)).from_pretrained
            again = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
            assert torch.equal(self.logits(again, batch), expected)
            with pytest.raises(UnsupportedError, match=rf"hfplug\.apply\(model, '{self.method}'"):
                PeftModel.from_pretrained(self.stock(family), tmp_path / "adapter")
        try:
            merged = again.merge_and_unload()
        except UnsupportedError as refused:
            assert self.method in str(refused)  # noqa: PT017
        else:
            assert relative(self.logits(merged, batch), expected) <= 1e-5, "merging changes the logits"
