"""The contract of a quantizer. A method joins it in one line::

    class TestMxfp4Plus(QuantizerContract):
        method, options, quantises_inputs = "mxfp4_plus", {"scale": "oas"}, False

Every property is checked through ``from_pretrained`` and ``save_pretrained`` of tiny models built from configs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hfplug.testing import models
from hfplug.testing.quantizer_adapters import QuantizerAdapters

FAMILIES = ("llama", "qwen3", "gemma3")


class QuantizerContract(QuantizerAdapters):
    """What every quantizer keeps; subclass it with a name that starts with ``Test``.

    Attributes:
        method: name in the catalogue.
        options: the options it is tested with.
        other: an option with a value that stores other weights.
        tuners: name -> function that puts an adapter whose weights do something on a model; ``"lora"`` is PEFT's.
        merging: one of them, a tuner of a plugin, that merges into quantised weights by its flag alone.
        quantises_inputs: whether activations are quantised too: the logits then are not those of the dequantised model.
        bits: bound of bits per weight in a saved file, for a layer of 128 inputs.
        error: bound of the relative RMS error of a Gaussian weight matrix ``(64, 128)``.
    """

    other: ClassVar[Mapping[str, Any]]
    bits: ClassVar[float]
    error: ClassVar[float]

    # -- values -------------------------------------------------------------------------------------------------------

    def test_the_error_and_the_bits_are_bounded(self) -> None:
        """On a Gaussian matrix; and something is lost: it is no identity."""
        import torch

        linear = torch.nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
        packed = self.linear_cls().from_linear(linear, self.config())
        lost = (packed.unpack(torch.float32) - linear.weight).square().mean().sqrt() / linear.weight.square().mean().sqrt()
        assert 0 < lost <= self.error
        stored = sum(p.numel() * p.element_size() for p in packed.parameters())
        assert packed.bits_per_weight == 8 * stored / linear.weight.numel()
        assert packed.bits_per_weight <= self.bits

    def test_no_size_can_be_taken_for_full_precision(self) -> None:
        """The shape of the packed weight is never that of the weight, so stock transformers refuses the file."""
        for out_features in (1, 2, 8, 48, 128):
            for in_features in (1, 8, 16, 31, 32, 48, 64, 96, 127, 128, 256):
                shape, dtype = self.linear_cls().layout(out_features, in_features, self.config())["weight"]
                assert tuple(shape) != (out_features, in_features)
                assert not dtype.is_floating_point

    def test_any_input_size_is_packed_and_rows_do_not_mix(self) -> None:
        """Sizes that no block divides; a row alone is packed as in the matrix."""
        import torch

        for size in (1, 7, 31, 33, 127, 129):
            weight = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
            linear = torch.nn.Linear(size, 3, bias=False)
            linear.weight = torch.nn.Parameter(weight)
            whole = self.linear_cls().from_linear(linear, self.config()).unpack(torch.float32)
            assert whole.shape == weight.shape
            linear = torch.nn.Linear(size, 1, bias=False)
            linear.weight = torch.nn.Parameter(weight[1:2])
            assert torch.equal(self.linear_cls().from_linear(linear, self.config()).unpack(torch.float32), whole[1:2])

    def test_packing_what_was_unpacked_changes_nothing(self) -> None:
        """Idempotent, bit for bit, in the tensors that are stored; so a dequantised folder can be packed again."""
        import torch

        cls, config = self.linear_cls(), self.config()
        linear = torch.nn.Linear(96, 16, bias=False)
        first = cls.from_linear(linear, config)
        again = cls.from_linear(self.plain(first), config)
        lost = (again.unpack(torch.float32) - first.unpack(torch.float32)).abs().max() / linear.weight.abs().max()
        assert lost <= self.drift

    drift: ClassVar[float] = 0.0
    """How far packing again may move a weight, relative to the largest; 0: not at all."""

    # -- loading and saving -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_quantised_on_load_is_each_weight_packed(self, family: str, dtype: str, tmp_path: Path) -> None:
        """Every linear layer but the head holds what packing its weight gives; everything else is as in the checkpoint."""
        import torch

        stock, model = self.loaded(tmp_path, family, dtype=dtype)
        plain = stock.state_dict()
        packed = self.packed(model)
        linear = {n for n, m in stock.named_modules() if type(m) is torch.nn.Linear and m is not stock.get_output_embeddings()}
        assert set(packed) == linear
        for name, module in packed.items():
            expected = self.linear_cls().pack(plain[f"{name}.weight"], module.config)
            for key, tensor in expected.items():
                assert torch.equal(getattr(module, key), tensor), f"{name}.{key}"
        for name, tensor in model.state_dict().items():
            if name in plain and name.rpartition(".")[0] not in packed:
                assert torch.equal(tensor, plain[name]), name
        assert {p.dtype for n, p in model.named_parameters() if n in plain and n.rpartition(".")[0] not in packed} == {
            stock.dtype
        }
        assert model.is_quantized
        assert not any(p.requires_grad for m in packed.values() for p in m.parameters())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_logits_are_those_of_the_dequantised_model_and_not_of_the_original(self, family: str, tmp_path: Path) -> None:
        """0 ulp where only weights are quantised; where inputs are too, the logits differ."""
        import torch

        stock, model = self.loaded(tmp_path, family)
        again = self.load(tmp_path / "full")
        assert torch.equal(self.logits(again), self.logits(model))
        plain = again.dequantize()
        same = torch.equal(self.logits(plain), self.logits(model))
        assert same is not self.quantises_inputs
        assert not torch.equal(self.logits(model), self.logits(stock))
        assert not self.packed(plain)
        assert not plain.is_quantized
        with self.quiet():
            plain.save_pretrained(tmp_path / "plain")
            stored = json.loads((tmp_path / "plain" / "config.json").read_text())
            assert stored.keys().isdisjoint({"quantization_config", "transformers_weights"})
            assert torch.equal(self.logits(self.load(tmp_path / "plain", None)), self.logits(plain))

    @pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma3", "bfloat16")])
    def test_b50_a_packed_folder_is_the_model(self, family: str, dtype: str, tmp_path: Path) -> None:
        """The same tensors and logits, no key missing or left over; saved again, the same file; smaller than it was."""
        import torch

        _, model = self.loaded(tmp_path, family, dtype=dtype)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
            again, info = self.load(tmp_path / "a", None, dtype="auto", output_loading_info=True)
            again.save_pretrained(tmp_path / "b")
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        self.same(model, again)
        assert torch.equal(self.logits(model), self.logits(again))
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name

    def test_shards_and_a_model_without_its_head(self, tmp_path: Path) -> None:
        """Saved in shards and read by the class without a head: the same packed tensors."""
        import torch
        import transformers

        _, model = self.loaded(tmp_path)
        with self.quiet():
            model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
            assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
            again, base = self.load(tmp_path / "shards", None), transformers.AutoModel.from_pretrained(tmp_path / "shards")
            scored = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "shards", num_labels=2)
        self.same(model, again)
        self.same(model.model, base)
        assert type(scored.score) is torch.nn.Linear
        self.same(model.model, scored.model)

    def test_options_come_as_a_dict_too(self, tmp_path: Path) -> None:
        """``quantization_config={"quant_method": ...}``; a wrong option is an error that names the nearest."""
        from hfplug.errors import ConfigError

        _, model = self.loaded(tmp_path)
        asked = {"quant_method": self.method, **self.options}
        self.same(model, self.load(tmp_path / "full", asked))
        with pytest.raises(ConfigError, match="modules_to_not_convert"):
            self.load(tmp_path / "full", {**asked, "modules_to_not_convrt": ["q_proj"]})

    def test_modules_are_left_alone(self, tmp_path: Path) -> None:
        """By name, also after saving; one that is not there is an error; the configuration of the user is not written to."""
        import torch
        import transformers

        from hfplug.errors import ConfigError

        stock, _ = self.loaded(tmp_path)
        asked = self.config(modules_to_not_convert=["down_proj", "model.layers.1"])
        kept = copy.deepcopy(asked)
        model = self.load(tmp_path / "full", asked)
        assert asked == kept
        assert {n.rpartition(".")[2] for n in self.packed(model)} == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
        }
        assert all(n.startswith("model.layers.0.") for n in self.packed(model))
        assert torch.equal(model.model.layers[1].mlp.up_proj.weight, stock.model.layers[1].mlp.up_proj.weight)
        with self.quiet():
            model.save_pretrained(tmp_path / "left")
            base = transformers.AutoModel.from_pretrained(tmp_path / "left")
        self.same(model, self.load(tmp_path / "left", None))
        self.same(model.model, base)  # whose names lack the prefix that one of the patterns has
        with pytest.raises(ConfigError, match=r"'dwn_proj'.*'down_proj'"):
            self.load(tmp_path / "full", self.config(modules_to_not_convert=["dwn_proj"]))

    def test_a_tied_head_stays_tied_and_whole(self, tmp_path: Path) -> None:
        import torch

        stock, model = self.loaded(tmp_path, tie_word_embeddings=True)
        for loaded in (model, self.saved_again(model, tmp_path)):
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
            assert torch.equal(loaded.lm_head.weight, stock.lm_head.weight)
        assert "lm_head" not in self.packed(model)

    def test_a_model_without_linear_layers_is_refused(self, tmp_path: Path) -> None:
        from hfplug.errors import UnsupportedError

        with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel.*Conv1D"):
            self.loaded(tmp_path, "gpt2")

    def test_b44_one_line_says_how_it_runs(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Native, emulated or dequantised, once for each loading."""
        with caplog.at_level(logging.INFO, "hfplug"):
            self.loaded(tmp_path)
            self.load(tmp_path / "full", self.config(dequantize=True))
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{self.method}: ")]
        assert len(lines) == 2
        assert ("native" in lines[0]) != ("emulated" in lines[0])
        assert "dequantised" in lines[1]

    def test_dequantize_in_the_configuration(self, tmp_path: Path) -> None:
        """Of a full and of a packed folder: ordinary layers with the same weights, a folder that needs no plugin."""
        import torch

        _, model = self.loaded(tmp_path)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
        plain = model.dequantize().state_dict()
        for folder, asked in (("full", self.config(dequantize=True)), ("a", {"quant_method": self.method, "dequantize": True})):
            again = self.load(tmp_path / folder, asked)
            assert not self.packed(again)
            assert not again.is_quantized
            assert not hasattr(again.config, "quantization_config")
            assert all(torch.equal(tensor, plain[name]) for name, tensor in again.state_dict().items())

    # -- refusals -----------------------------------------------------------------------------------------------------

    def test_a_folder_without_hfplug_is_refused(self, tmp_path: Path) -> None:
        """A stock process refuses it, twice over: the error says what to install, and the shapes are not those of weights."""
        from hfplug import activation

        _, model = self.loaded(tmp_path)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
        with self.stock():
            assert not {"hfplug.seams.gate", "hfplug.seams.quantizer"} & set(activation.active())
            with pytest.raises(OSError, match="pip install"):
                self.load(tmp_path / "a", None)
            stored = json.loads((tmp_path / "a" / "config.json").read_text())
            del stored["transformers_weights"]
            (tmp_path / "a" / "config.json").write_text(json.dumps(stored))
            with pytest.raises(RuntimeError, match=r"size|mismatch"):
                self.load(tmp_path / "a", None)

    def test_b03_a_folder_without_the_plugin_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """hfplug without this plugin: the error says which plugin wrote the model and how to install it."""
        from hfplug.errors import MissingPluginError
        from hfplug.plugins import catalogue

        _, model = self.loaded(tmp_path)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
        distribution = catalogue().entries[self.method].source.distribution
        monkeypatch.delitem(catalogue().entries, self.method)
        with pytest.raises(MissingPluginError, match=self.method) as caught:
            self.load(tmp_path / "a", None)
        assert f'pip install "{distribution}' in str(caught.value)

    def test_a_packed_folder_is_not_read_as_another_format(self, tmp_path: Path) -> None:
        """Another option than the stored one is an error; so are an unknown option in the file and a tensor that is missing."""
        from safetensors.torch import load_file, save_file

        from hfplug.errors import ConfigError, HfplugError

        _, model = self.loaded(tmp_path)
        with self.quiet():
            model.save_pretrained(tmp_path / "a")
        (option,) = self.other
        with pytest.raises(ConfigError, match=option):
            self.load(tmp_path / "a", self.config(**self.other))
        self.same(model, self.load(tmp_path / "a", self.config()))
        file = tmp_path / "a" / "config.json"
        text = file.read_text()
        file.write_text(text.replace('"quant_method"', '"nonsense": 1, "quant_method"', 1))
        with pytest.raises(ConfigError, match="nonsense"):
            self.load(tmp_path / "a", None)
        file.write_text(text)
        tensors = load_file(tmp_path / "a" / "model.safetensors")
        extra = next(n for n in self.linear_cls().layout(8, 128, self.config()) if n != "weight")
        del tensors[f"model.layers.0.mlp.up_proj.{extra}"]
        save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
        with pytest.raises(HfplugError, match=f"{extra}.*up_proj"):
            self.load(tmp_path / "a", None)

    def test_another_seam_of_transformers_is_as_before(self) -> None:
        """Undone, the two mappings and both functions of transformers are the stock ones."""
        from transformers.quantizers import auto

        with self.stock():
            assert "hfplug" not in auto.AutoHfQuantizer.supports_quant_method.__code__.co_filename
            assert "hfplug" not in auto.AutoHfQuantizer.merge_quantization_configs.__func__.__code__.co_filename

    # -- use ----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_b10_greedy_tokens_do_not_depend_on_the_cache(self, cache: str, tmp_path: Path) -> None:
        """Sixteen tokens with a cache are those without."""
        import torch

        _, model = self.loaded(tmp_path, "gemma3")
        ids = models.tiny_lm_dataset(1, shortest=9, longest=9)[0]["input_ids"]
        asked = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        with self.quiet():
            without = model.generate(torch.tensor([ids]), use_cache=False, **asked)
            found = model.generate(torch.tensor([ids]), cache_implementation=cache, **asked)
        assert torch.equal(found, without)

    def test_a_copy_computes_the_same_and_shares_nothing(self, tmp_path: Path) -> None:
        import torch

        _, model = self.loaded(tmp_path)
        twin = copy.deepcopy(model)
        assert torch.equal(self.logits(twin), self.logits(model))
        pairs = zip(self.packed(model).values(), self.packed(twin).values(), strict=True)
        assert all(one.weight.data_ptr() != other.weight.data_ptr() for one, other in pairs)

    # -- tools --------------------------------------------------------------------------------------------------------

    def saved_again(self, model: Any, tmp_path: Path) -> Any:
        """The model of a folder it was saved in."""
        with self.quiet():
            model.save_pretrained(tmp_path / "again")
            return self.load(tmp_path / "again", None)

    def same(self, model: Any, other: Any) -> None:
        """Both have the same tensors, bit for bit."""
        import torch

        one, two = model.state_dict(), other.state_dict()
        assert list(one) == list(two)
        for name, tensor in one.items():
            assert tensor.dtype == two[name].dtype, name
            assert torch.equal(tensor, two[name]), name

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """transformers as it is without hfplug: the seams of quantizers are taken out, and put back."""
        from hfplug import activation

        seams = ("hfplug.seams.gate", "hfplug.seams.quantizer")
        for seam in seams:
            activation._ledgers.pop(seam).undo()
        try:
            yield
        finally:
            for seam in seams:
                activation.activate(seam)
