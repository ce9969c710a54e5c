"""MoLoRA: the contract of a tuner, with the decision per layer (default) and per module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hfplug.testing.tuner import TunerContract


class MoLoraContract(TunerContract):
    method, options = "molora", {"router_hidden": 16}
    compiles = False  # how many rows an expert gets is data, which breaks the graph
    reentrant = False  # hides the gradient of a router that reads the input of a decoder layer
    family = "llama"

    @pytest.fixture(autouse=True)
    def _kit(self, molora):
        self.kit = molora

    def config(self, **options: Any) -> Any:
        """Over three LoRA folders of own ranks and scalings, one of which misses targets."""
        return self.kit.config(self.family, **{**self.options, **options})

    def wrap(self, model: Any, **options: Any) -> Any:
        """With the folders that fit the model."""
        self.family = self.kit.family_of(model)
        return super().wrap(model, **options)


class TestMoLoraContract(MoLoraContract):
    def test_b53_no_path_of_an_expert_is_written(self, tmp_path: Path) -> None:
        """Neither folder nor file of the experts stands in anything that is saved; the experts' tensors do."""
        model, adapter, _ = self.saved(tmp_path)
        model.save_pretrained(adapter)
        places = [str(Path(self.kit.expert("llama", name)).parent) for name in self.kit.SETTINGS]
        for file in adapter.iterdir():
            content = file.read_bytes()
            assert not [place for place in places if place.encode() in content], file.name
        stored = json.loads((adapter / "adapter_config.json").read_text())["experts"]
        assert {name: set(record) for name, record in stored.items()} == {
            name: {"sha256", "modules"} for name in self.kit.SETTINGS
        }


class TestMoLoraChosenContract(MoLoraContract):
    """Only the chosen expert gives a gradient: a fresh router spreads the tokens."""

    options: ClassVar[dict[str, Any]] = {"router_hidden": 16, "router_gradient": "chosen"}
    identity_at_init = False


class TestMoLoraPerModuleContract(MoLoraContract):
    options: ClassVar[dict[str, Any]] = {"router_hidden": 16, "router_scope": "module"}
    reentrant = True
