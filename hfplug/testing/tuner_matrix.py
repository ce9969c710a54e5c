"""The part of the tuner contract that crosses families of models with kinds of bases, ranks and compilation."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hfplug.testing import models
from hfplug.testing.kernels import rms_ratio
from hfplug.testing.ranks import run_ranks

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")
BASES = ("bf16", "nf4")  # fp32 is what every other test of the contract runs on

_RANKS = """
import os, sys, pickle, torch, hfplug
folder = sys.argv[1]
world = int(os.environ.get("WORLD_SIZE", 1))
with open(folder + "/model.pickle", "rb") as file:
    model = pickle.load(file)
from hfplug.optimization import prepare
from hfplug.testing import models
trainer = models.tiny_trainer(model, max_steps=3, per_device_train_batch_size=4 // world, learning_rate=0.1,
                              output_dir=folder, train_dataset=models.tiny_lm_dataset(16, shortest=9, longest=9),
                              ddp_find_unused_parameters=False)
prepare(trainer)
trainer.train()
if trainer.is_world_process_zero():
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(f"{folder}/ranks-{world}")
"""


def build(family: str, base: str) -> Any:
    """A tiny model of a family in ``"fp32"``, ``"bf16"`` or ``"nf4"`` (bitsandbytes, computing in float32)."""
    import torch

    if base != "nf4":
        return models.TINY_MODELS[family]().to({"fp32": torch.float32, "bf16": torch.bfloat16}[base])
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # bitsandbytes on a CPU wants the sides of a matrix in multiples of its block
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
    sizes = {"hidden_size": 64} if family == "gpt2" else {**sizes, "head_dim": 64} if family == "gemma3" else sizes
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        models.TINY_MODELS[family](**sizes).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.float32)
    for module in model.modules():
        # On a CPU with AVX512-BF16 bitsandbytes lays the weights out anew at the first evaluation, for a kernel that has no
        # gradient, and goes on to use it in training.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


class TunerMatrixContract:
    """Families × bases; part of :class:`hfplug.testing.tuner.TunerContract`.

    Attributes:
        compiles: whether ``torch.compile(fullgraph=True)`` takes the adapted model in evaluation; ``False``: it breaks the
            graph, and then compiling in pieces must still give the same logits.
        merges_quantized: whether ``merge_quantized=True`` merges into 4 bits; ``False``: it is refused all the same.
        reentrant: whether reentrant checkpointing works; ``False``: it must be refused in the forward.
    """

    method: ClassVar[str]
    compiles: ClassVar[bool] = True
    merges_quantized: ClassVar[bool] = True
    reentrant: ClassVar[bool] = True

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_on_every_kind_of_base(self: Any, family: str, base: str) -> None:
        """Trains the adapter alone; checkpointing, padding, the cache and a second adapter change nothing they should not."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bitsandbytes and transformers on a CPU
            bare, batch = build(family, base), self.batch()
            expected = self.logits(bare, batch)
            packed = {n: p.detach().clone() for n, p in bare.named_parameters()}
            model = self.trained(bare)
            for name, parameter in model.named_parameters():
                key = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
                if key in packed:
                    assert torch.equal(parameter, packed[key]), f"{name} of the base moved"
            logits = self.logits(model, batch)
            assert torch.isfinite(logits).all()
            assert logits.dtype == expected.dtype
            assert not torch.equal(logits, expected), "training did not change the output"
            with model.disable_adapter():
                assert torch.equal(self.logits(model, batch), expected)
            self._checkpointed(model, base)
            self._padded(model, base)
            self._cached(model, base)
            state = self.state(model)
            model.add_adapter("b", self.config())
            model.set_adapter("b")
            self.train(model, steps=1, seed=4)
            model.set_adapter("default")
            from hfplug.testing.tuner_files import assert_equal_states

            assert_equal_states(self.state(model), state, 0, "after training another adapter")
            assert torch.equal(self.logits(model, batch), logits)

    def _gradients(self: Any, model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        model.train()
        torch.manual_seed(3)
        model(**batch, labels=self.labels(batch)).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        model.zero_grad()
        return found

    def _checkpointed(self: Any, model: Any, base: str) -> None:
        batch = self.batch(padded=True)
        twin = copy.deepcopy(model) if base != "nf4" else model
        expected = self._gradients(model, batch)
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        twin.enable_input_require_grads()
        found = self._gradients(twin, batch)
        twin.gradient_checkpointing_disable()
        assert expected
        assert sorted(found) == sorted(expected)
        for name, gradient in expected.items():
            difference = (found[name] - gradient).abs().max().item()
            assert difference <= 1e-6, f"with checkpointing the gradient of {name} is off by {difference:.2e}"

    def _padded(self: Any, model: Any, base: str) -> None:
        ids = self.batch(rows=2)["input_ids"]
        mask = ids.new_ones(ids.shape)
        mask[0, :3] = 0
        batch = {"input_ids": ids.masked_fill(mask == 0, models.PAD), "attention_mask": mask}
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)

        def off(adapted: Any) -> Any:
            alone = self.logits(adapted, {"input_ids": ids[:1, 3:]})[0]
            return rms_ratio(self.logits(adapted, batch)[0, 3:], alone)

        self._within(off, model, base, "left padding")

    def _cached(self: Any, model: Any, base: str) -> None:
        import torch

        ids = self.batch(rows=2)["input_ids"]

        def off(adapted: Any) -> Any:
            whole = self.logits(adapted, {"input_ids": ids})
            with torch.no_grad():
                first = adapted.eval()(input_ids=ids[:, :6], use_cache=True)
                rest = [adapted(input_ids=ids[:, i : i + 1], cache=first.cache).logits for i in range(6, ids.shape[1])]
            return rms_ratio(torch.cat([first.logits, *rest], 1), whole)

        self._within(off, model, base, "a cache")

    def _within(self: Any, off: Any, model: Any, base: str, what: str) -> None:
        # In bfloat16 the base model itself rounds differently on another path; the adapter must not add to that.
        allowed = 1e-5
        if base == "bf16":
            with model.disable_adapter():
                allowed = 5e-3 + off(model)
        found = off(model)
        assert found <= allowed, f"{what} changes the logits by {found:.1e} of their size, allowed {allowed:.1e}"

    # -- merging ------------------------------------------------------------------------------------------------------

    def test_b49_merging_into_4_bits_is_asked_for_measured_and_taken_back(self: Any) -> None:
        """Refused without the flag; with it a warning states the difference, and unmerging restores the packed bits."""
        import torch

        if self.merge is None:
            pytest.skip("this tuner does not merge at all")
        batch = self.batch()
        model = self.trained(build("llama", "nf4"), **self.merge)
        packed = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
        logits = self.logits(model, batch)
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(NotImplementedError, match="merge_quantized"):
                merge()
        assert torch.equal(self.logits(model, batch), logits), "a refused merge changed the model"
        if not self.merges_quantized:
            return
        model.peft_config["default"].merge_quantized = True
        with pytest.warns(UserWarning, match=r"logits moved by up to [0-9.e-]+"):
            model.merge_adapter()
        merged = self.logits(model, batch)
        assert not torch.equal(merged, logits)
        model.unmerge_adapter()
        now = {n: p for n, p in model.named_parameters() if p.dtype == torch.uint8}
        assert packed
        assert all(torch.equal(now[n], p) for n, p in packed.items()), "unmerging did not restore the packed weights"
        assert torch.equal(self.logits(model, batch), logits)

    def test_b48_merging_into_a_tied_matrix_is_refused(self: Any) -> None:
        """The head shares its matrix with the embedding: a merge would change both."""
        import torch

        if self.merge is None:
            pytest.skip("this tuner does not merge at all")
        bare, batch = models.tiny_llama(tie_word_embeddings=True), self.batch()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self.trained(bare, **self.merge, target_modules=["lm_head", "q_proj"])
        except ValueError as error:  # a tuner may refuse the head altogether
            assert "lm_head" in str(error)  # noqa: PT017
            return
        logits = self.logits(model, batch)
        embedding = bare.get_input_embeddings().weight.detach().clone()
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(NotImplementedError, match="tied"):
                merge()
        assert torch.equal(bare.get_input_embeddings().weight, embedding)
        assert torch.equal(self.logits(model, batch), logits)

    # -- sharded shapes, ranks, compilation ---------------------------------------------------------------------------

    def test_b57_a_sharded_base_is_read_by_its_true_shape(self: Any) -> None:
        """A weight that ZeRO-3 has taken away has shape (0,); the adapter's shapes are those of the whole module."""
        import torch

        bare = models.tiny_llama()
        expected = {n: p.shape for n, p in self.wrap(copy.deepcopy(bare)).named_parameters() if p.requires_grad}
        for module in bare.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.ds_shape = module.weight.shape  # type: ignore[attr-defined]
                module.weight.data = torch.empty(0)
        found = {n: p.shape for n, p in self.wrap(bare).named_parameters() if p.requires_grad}
        assert found == expected

    @pytest.mark.slow
    def test_b59_torch_compile(self: Any) -> None:
        """In evaluation: one graph, and another batch size compiles no more often than with PEFT's LoRA; or pieces, but right."""
        import peft
        import torch
        from torch._dynamo import testing

        make_counter: Any = testing.CompileCounter
        reset: Any = torch._dynamo.reset

        def compiled(model: Any, fullgraph: bool) -> int:
            reset()
            counter: Any = make_counter()
            fast: Any = torch.compile(model.eval(), backend=counter, fullgraph=fullgraph)
            with torch.no_grad():
                for rows in (2, 3, 4):
                    batch = self.batch(rows=rows)
                    assert (fast(**batch).logits - self.logits(model, batch)).abs().max() <= 1e-6
            reset()
            return int(counter.frame_count)

        model = self.trained(models.tiny_llama())
        if not self.compiles:
            compiled(model, fullgraph=False)
            return
        lora = peft.get_peft_model(models.tiny_llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
        assert compiled(model, fullgraph=True) <= compiled(lora, fullgraph=True)

    @pytest.mark.slow
    def test_b58_two_ranks_train_what_one_trains(self: Any, tmp_path: Path) -> None:
        """DDP over two gloo ranks with half the batch each: the adapter of a single process, within 1e-5."""
        import pickle

        from safetensors.torch import load_file

        from hfplug.testing.tuner_files import assert_equal_states

        (tmp_path / "ranks.py").write_text(_RANKS)
        with (tmp_path / "model.pickle").open("wb") as file:
            pickle.dump(self.trained(models.tiny_llama()), file)
        start = {n: t.clone() for n, t in self.trained(models.tiny_llama()).named_parameters() if t.requires_grad}
        for ranks in (1, 2):
            run_ranks(tmp_path / "ranks.py", str(tmp_path), ranks=ranks, timeout=120)
        one, two = (load_file(tmp_path / f"ranks-{world}" / "adapter_model.safetensors") for world in (1, 2))
        stored = {n: ".".join(part for part in n.split(".") if part != "default") for n in start}  # as files name them
        moved = [n for n, t in start.items() if (t - one[stored[n]]).abs().max() > 1e-4]
        assert moved, "training moved nothing"
        assert_equal_states(two, one, 1e-5, "on two ranks")
