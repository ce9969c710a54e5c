"""The contract of a tuner. A method joins it in one line::

    class TestULora(TunerContract):
        method, options = "ulora", {"r": 4}

Every property is checked on tiny models built from configs; the checks named B.. are the silent faults users met elsewhere.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hfplug.testing import models
from hfplug.testing.runs import off
from hfplug.testing.tuner_files import TunerFilesContract, assert_equal_states
from hfplug.testing.tuner_matrix import FAMILIES, TunerMatrixContract


class TunerContract(TunerFilesContract, TunerMatrixContract):
    """What every tuner of hfplug keeps; subclass it with a name that starts with ``Test``.

    Attributes:
        method: name in the catalogue.
        options: its options; the tests choose ``target_modules`` themselves.
        dropout: options that switch its randomness on, for the check that recomputation draws the same numbers.
        merge: options under which merging is exact; ``None``: the tuner must refuse to merge.
        identity_at_init: whether a fresh adapter leaves the model as it was; ``"evaluation"``: there alone, because training
            draws weights.
        compiles, reentrant: see :class:`~hfplug.testing.tuner_matrix.TunerMatrixContract`.
        export: whether ``hfplug export --to lora`` is exact, an approximation on request, or refused (``None``).
        tolerance: for what must agree in fp32 but is summed in another order.
    """

    # -- outputs ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_fresh_adapter_changes_nothing(self, family: str) -> None:
        """0 ulp, in training mode too unless the tuner says otherwise."""
        import torch

        base, batch = models.TINY_MODELS[family](), self.batch()
        if not self.identity_at_init:
            pytest.skip("identity_at_init is False for this tuner")
        model = self.wrap(copy.deepcopy(base))
        for mode in (False,) if self.identity_at_init == "evaluation" else (False, True):
            found, expected = self.logits(model, batch, mode), self.logits(base, batch, mode)
            assert torch.equal(found, expected), f"training={mode}: the logits moved by {(found - expected).abs().max():.2e}"

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_trained_adapter_changes_the_output_and_nothing_of_the_base(self, family: str) -> None:
        """Only the adapter trains; with it off, the base model answers bit for bit."""
        import torch

        base, batch = models.TINY_MODELS[family](), self.batch()
        model = self.wrap(copy.deepcopy(base))
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        prefix = f".{self.method}_"
        assert names, "nothing trains"
        assert all(prefix in name for name in names), f"trains without the prefix {prefix!r}: {sorted(names)[:3]}"
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.train(model, steps=2)
        still = sorted(name for name in names if torch.equal(before[name], model.get_parameter(name)))
        assert not still, f"two steps did not move {still[:3]}"
        moved = [name for name in set(before) - names if not torch.equal(before[name], model.get_parameter(name))]
        assert not moved, f"training moved weights of the base: {moved[:3]}"
        expected = self.logits(base, batch)
        assert not torch.allclose(self.logits(model, batch), expected, atol=1e-5), "training did not change the output"
        with model.disable_adapter():
            assert torch.equal(self.logits(model, batch), expected), "disable_adapter() does not give the base model back"
        assert not torch.equal(self.logits(model, batch), expected), "the adapter stayed off after disable_adapter()"

    @pytest.mark.parametrize("family", FAMILIES)
    def test_left_padding_and_batching_do_not_count(self, family: str) -> None:
        """Rows padded on the left, rows alone, rows together: the same logits."""
        model, ids = self.trained(models.TINY_MODELS[family]()), self.batch(rows=3)["input_ids"]
        alone = [self.logits(model, {"input_ids": ids[i : i + 1, i:]}) for i in range(3)]
        mask = ids.new_ones(ids.shape)
        for i in range(3):
            mask[i, :i] = 0
        padded = {"input_ids": ids.masked_fill(mask == 0, models.PAD), "attention_mask": mask}
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        together = self.logits(model, padded)
        for i in range(3):
            difference = (together[i, i:] - alone[i][0]).abs().max().item()
            assert difference <= self.tolerance, f"row {i}, {i} tokens of padding: {difference:.2e}"

    @pytest.mark.parametrize("beams", [1, 3])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_generation_with_and_without_cache(self, family: str, beams: int) -> None:
        """Left-padded greedy and beam search: the same tokens and scores with a cache and by recomputation."""
        import torch

        cached, plain = self._decoded(family, 3, {"use_cache": True}, num_beams=beams)
        assert torch.equal(cached.sequences, plain.sequences)
        _same_logits(cached, plain, "a cache")

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_static_cache_decoding_is_the_recomputed_one(self, family: str, padded: bool) -> None:
        """A preallocated cache: its unwritten places are attended to if anything makes transformers leave out the mask."""
        _same_logits(*self._decoded(family, 3 * padded, {"cache_implementation": "static"}), "a static cache")

    def _decoded(self, family: str, padding: int, cache: Mapping[str, Any], **settings: Any) -> tuple[Any, Any]:
        """What a trained model generates with a cache and by recomputation; the first row has padding on its left."""
        import torch

        model, batch = self.trained(models.TINY_MODELS[family]()).eval(), self.batch()
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :padding] = 0
        shared: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": models.PAD}
        shared |= {"return_dict_in_generate": True, "output_logits": True, **settings}
        return model.generate(**batch, **shared, **cache), model.generate(**batch, **shared, use_cache=False)

    # -- training -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    def test_b56_checkpointing_changes_no_gradient_and_no_statistic(self, reentrant: bool) -> None:
        """Gradient checkpointing, with every dropout on: same gradients, same state after the step."""
        import torch

        found = []
        for checkpointing in (False, True):
            model = self.trained(models.tiny_llama(attention_dropout=0.2), **self.dropout).train()
            if checkpointing and reentrant and not self.reentrant:
                self._refuses_reentrant(model)
                return
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
                model.enable_input_require_grads()
            optimizer = self.optimizer(model)
            torch.manual_seed(11)
            batch = self.batch(padded=True)
            model(**batch, labels=self.labels(batch)).loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
            optimizer.step()
            found.append((gradients, self.state(model)))
        for name, gradient in found[0][0].items():
            difference = (found[1][0][name] - gradient).abs().max().item()
            assert difference <= 1e-6, f"the gradient of {name} is off by {difference:.2e}"
        assert_equal_states(found[1][1], found[0][1], 1e-6, "after a step with checkpointing")

    def _refuses_reentrant(self, model: Any) -> None:
        import hfplug

        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        batch = self.batch()
        with pytest.raises(hfplug.UnsupportedError, match="use_reentrant"):
            model(**batch, labels=self.labels(batch))

    def test_accumulation_is_the_batch(self) -> None:
        """8 rows at once, or in 8 micro-batches: the same weights and statistics after two steps."""
        states = []
        for rows in (8, 1):
            model = self.wrap(models.tiny_llama())
            sizes: dict[str, Any] = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
            models.tiny_trainer(model, max_steps=2, learning_rate=0.1, **sizes).train()
            states.append(self.state(model))
        assert_equal_states(states[1], states[0], 1e-6, "in 8 micro-batches")

    @pytest.mark.parametrize("sft", [False, True], ids=["trainer", "sft"])
    def test_peft_config_and_optimizer_groups(self, sft: bool, tmp_path: Path) -> None:
        """TRL's ``peft_config=``; the tuner's groups in a stock trainer hold every trainable parameter once."""
        import torch
        import trl

        import hfplug
        from hfplug.optimization import optimizer_groups, prepare

        if sft:
            args = trl.SFTConfig(str(tmp_path), max_steps=2, report_to=[], bf16=False, use_cpu=True, disable_tqdm=True)
            trainer: Any = trl.SFTTrainer(
                models.tiny_llama(), args=args, train_dataset=models.tiny_lm_dataset(),
                processing_class=models.tiny_tokenizer(), peft_config=self.config(),
            )  # fmt: skip
        else:
            trainer = models.tiny_trainer(self.wrap(models.tiny_llama()), max_steps=2, optim="adamw_torch", weight_decay=0.1)
        prepare(trainer)
        trainer.train()
        held = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
        trainable = [id(p) for p in trainer.model.parameters() if p.requires_grad]
        assert sorted(held) == sorted(trainable), "the optimizer does not hold every trainable parameter exactly once"
        lr = trainer.args.learning_rate
        for group in optimizer_groups(trainer.model):
            ids = {id(p) for p in group.parameters}
            for held_group in trainer.optimizer.param_groups:
                if ids & {id(p) for p in held_group["params"]}:
                    assert held_group["initial_lr" if "initial_lr" in held_group else "lr"] == lr * group.lr_multiplier
                    assert group.weight_decay is None or held_group["weight_decay"] == group.weight_decay
        trainer.save_model(str(tmp_path / "saved"))
        record = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        assert record["hfplug"]["plugin"] == self.method
        batch, base = self.batch(), models.tiny_llama()
        loaded = self.load(tmp_path / "saved", base)
        assert torch.equal(self.logits(loaded, batch), self.logits(trainer.model, batch))
        assert hfplug.catalogue().get(self.method).method.kind == "tuner"

    # -- the model it stands on ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("family", FAMILIES)
    def test_b07_unload_leaves_the_model_as_it_was(self, family: str) -> None:
        """Attributes, module identities, hooks, state dict and configuration; wrapping again says nothing."""
        base = models.TINY_MODELS[family]()
        before = _snapshot(base)
        model = self.trained(base)
        self.logits(model, self.batch())
        model.unload()
        _assert_same_snapshot(_snapshot(base), before)
        said = []
        for each in (models.TINY_MODELS[family](), base):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.wrap(each).unload()
            said.append([str(w.message) for w in caught])
        assert said[1] == said[0], "wrapping again says something that wrapping a new model does not"
        _assert_same_snapshot(_snapshot(base), before)

    def test_b04_a_misspelt_target_is_refused_and_changes_nothing(self) -> None:
        """For the first and for a second adapter: the error names the nearest module, the model is as before."""
        import torch

        bare = models.tiny_llama()
        before = _snapshot(bare)
        with pytest.raises(ValueError, match="q_proj"):
            self.wrap(bare, target_modules=["q_pro"])
        _assert_same_snapshot(_snapshot(bare), before)
        assert all(p.requires_grad for p in bare.parameters()), "the refused adapter froze the model"
        model, batch = self.trained(models.tiny_llama()), self.batch()
        before, logits = _snapshot(model), self.logits(model, batch)
        grads = {name: p.requires_grad for name, p in model.named_parameters()}
        # The second name exists: only that all of a list is looked at before anything is changed keeps the model whole.
        for targets in (["q_pro"], ["v_proj", "embed_tokens", "norm"]):
            with pytest.raises(Exception, match="q_proj" if targets == ["q_pro"] else "embed_tokens|norm"):
                model.add_adapter("b", self.config(target_modules=targets))
            _assert_same_snapshot(_snapshot(model), before)
            assert {name: p.requires_grad for name, p in model.named_parameters()} == grads
            assert list(model.peft_config) == ["default"]
            assert model.active_adapters == ["default"]
            assert torch.equal(self.logits(model, batch), logits)
        model.add_adapter("b", self.config())  # the name is free again

    def test_b06_a_name_twice_is_refused(self) -> None:
        """By ``add_adapter`` and by ``inject_adapter_in_model``; the weights stay."""
        import peft

        model = self.trained(models.tiny_llama())
        before = self.state(model)
        with pytest.raises(ValueError, match="already"):
            model.add_adapter("default", self.config())
        inner = model.get_base_model()
        with pytest.raises(ValueError, match="already"):
            peft.inject_adapter_in_model(self.config(), inner, "default")
        assert_equal_states(self.state(model), before, 0, "after a refused second adapter")

    def test_b18_copies_and_other_models_are_independent(self) -> None:
        """A deep copy trains on its own, the original and other models of the class know nothing of it."""
        import torch

        other, batch = models.tiny_llama(seed=5), self.batch()
        expected, classes = self.logits(other, batch), [type(m) for m in other.modules()]
        model = self.trained(models.tiny_llama())
        logits, state = self.logits(model, batch), self.state(model)
        twin = copy.deepcopy(model)
        assert torch.equal(self.logits(twin, batch), logits)
        self.train(twin, steps=2, seed=9)
        assert not torch.equal(self.logits(twin, batch), logits), "the copy does not train"
        assert_equal_states(self.state(model), state, 0, "after training its copy")
        reference = self.trained(models.tiny_llama())
        self.train(reference, steps=2, seed=9)
        assert_equal_states(self.state(twin), self.state(reference), 0, "trained as a copy")
        twin.unload()
        assert torch.equal(self.logits(model, batch), logits), "unloading the copy touched the original"
        assert torch.equal(self.logits(other, batch), expected)
        assert [type(m) for m in other.modules()] == classes
        assert torch.equal(self.logits(models.tiny_llama(seed=5), batch), expected)

    def test_b19_weights_of_the_base_keep_identity(self) -> None:
        """The very parameters, tied ones still tied, dtype and device as they were."""
        base = models.tiny_llama(tie_word_embeddings=True)
        before = {name: (p, p.dtype, p.device) for name, p in base.named_parameters(remove_duplicate=False)}
        model = self.trained(base).get_base_model()
        now = dict(model.named_parameters(remove_duplicate=False))
        for name, (p, dtype, device) in before.items():
            head, _, tail = name.rpartition(".")
            kept: Any = now.get(name, now.get(f"{head}.base_layer.{tail}"))
            assert kept is p, f"{name} is no longer the same parameter"
            assert (p.dtype, p.device) == (dtype, device)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    @pytest.mark.parametrize("family", FAMILIES)
    def test_merge(self, family: str) -> None:
        """Exact to 1e-5 where allowed and taken back by unmerge; refused, with nothing changed, where not."""
        import torch

        batch = self.batch()
        model = self.trained(models.TINY_MODELS[family]())
        expected = self.logits(model, batch)
        if not self.merges_by_default:
            for merge in (model.merge_adapter, model.merge_and_unload):
                with pytest.raises(NotImplementedError):
                    merge()
                assert torch.equal(self.logits(model, batch), expected), "a refused merge changed the model"
        if self.merge is None:
            return
        model = self.trained(models.TINY_MODELS[family](), **self.merge)
        expected = self.logits(model, batch)
        model.merge_adapter(safe_merge=True)
        assert off(self.logits(model, batch), expected) <= 1e-5, "merged"
        model.unmerge_adapter()
        assert off(self.logits(model, batch), expected) <= 1e-5, "unmerged"
        merged = model.merge_and_unload()
        assert off(self.logits(merged, batch), expected) <= 1e-5, "merged and unloaded"
        assert not any(self.method in name for name in merged.state_dict())

    def test_pickle(self) -> None:
        """A pickled model answers the same and trains on the same way."""
        import torch

        model, batch = self.trained(models.tiny_llama()), self.batch()
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(self.logits(again, batch), self.logits(model, batch))
        for each in (model, again):
            self.train(each, steps=2, seed=4)
        assert_equal_states(self.state(again), self.state(model), 0, "trained after unpickling")

    @property
    def merges_by_default(self) -> bool:
        """Whether the tuner merges with the options as they are."""
        return self.merge is not None and not self.merge


def _same_logits(cached: Any, plain: Any, what: str) -> None:
    difference = max(off(a, b) for a, b in zip(cached.logits, plain.logits, strict=True))
    assert difference <= 1e-5, f"logits with {what} are off by {difference:.2e}"


def _snapshot(model: Any) -> dict[str, Any]:
    """What must be as before: attributes, modules by identity, hooks, values, configuration."""
    attributes = {}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in ("_modules", "_parameters", "_buffers")}
        hooks = {key: list(table) for key, table in own.items() if "_hooks" in key and isinstance(table, dict)}
        plain: dict[str, Callable[[], Any] | Any] = {
            k: v for k, v in own.items() if isinstance(v, (str, int, float, bool, type(None), list)) and k != "training"
        }
        attributes[name] = (sorted(own), hooks, copy.copy(plain))
    return {
        "attributes": attributes,
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "values": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
    }


def _assert_same_snapshot(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found["modules"] == expected["modules"], "modules differ from before"
    for name, own in expected["attributes"].items():
        assert found["attributes"][name] == own, f"attributes or hooks of {name or 'the model'!r} differ from before"
    assert list(found["values"]) == list(expected["values"]), "the state dict has other keys than before"
    for name, value in expected["values"].items():
        assert torch.equal(found["values"][name], value), f"{name} differs from before"
    assert found["config"] == expected["config"], "the configuration differs from before"
