"""The contract of a loss term. A method's test joins it in one line::

class TestNITP(LossContract):
    method = "nitp"
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing.models import PadTo, tiny_llama, tiny_lm_dataset, tiny_trainer

if TYPE_CHECKING:
    from hfplug.seams.loss import LossTerm, TermHandle

trainers = pytest.mark.parametrize("sft", [False, True], ids=["trainer", "sft"])


def one_step(**settings: Any) -> dict[str, Any]:
    """Settings of :func:`tiny_trainer` for one step on eight rows of different lengths, without clipping."""
    return {"max_steps": 1, "logging_steps": 1, "train_dataset": tiny_lm_dataset(8), "max_grad_norm": 0.0, **settings}


def _peft(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))


def _difference(a: Any, b: Any) -> float:
    """Largest absolute difference of two models' parameters, which must have the same names."""
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys(), f"different parameters: {sorted(ours.keys() ^ theirs.keys())}"
    apart = [float((ours[name] - theirs[name]).detach().abs().max()) for name in ours]
    assert all(map(math.isfinite, apart)), "parameters are not finite"  # max() would pass over a NaN
    return max(apart)


def _logs(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def snapshot(trainer: Any) -> dict[str, Any]:
    """What :meth:`LossContract.test_undo` compares: attributes, modules, hooks, state dict, callbacks."""
    model = trainer.model
    hooks = [n for n in vars(model) if n.endswith("_hooks")]
    return {
        "trainer": dict(vars(trainer)),
        "callbacks": list(trainer.callback_handler.callbacks),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {n: [len(getattr(m, h)) for h in hooks] for n, m in model.named_modules()},
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
    }


def assert_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Compare two snapshots: attributes of the trainer by identity, weights bit for bit."""
    import torch

    assert before["trainer"].keys() == after["trainer"].keys()
    changed = [name for name, value in before["trainer"].items() if after["trainer"][name] is not value]
    assert not changed, f"attributes of the trainer changed: {changed}"
    assert len(before["callbacks"]) == len(after["callbacks"])
    assert all(a is b for a, b in zip(before["callbacks"], after["callbacks"], strict=True))
    for what in ("modules", "attributes", "hooks", "config"):
        assert before[what] == after[what], f"{what} of the model changed"
    assert before["state"].keys() == after["state"].keys()
    assert all(torch.equal(before["state"][name], after["state"][name]) for name in before["state"])


class LossContract:
    """Properties of every loss term, on tiny models in fp32.

    Attributes:
        method: name of the method.
        options: options of its config, besides the weight.
        weight: a weight at which the term is on.
    """

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    weight: ClassVar[float] = 1.0

    # -- what a subclass may replace

    def model(self, **options: Any) -> Any:
        """A new causal language model, the same every time."""
        return tiny_llama(num_hidden_layers=4, **options)

    def term(self, **options: Any) -> str | LossTerm:
        """What is passed to ``hfplug.losses.add``; a name means that ``options`` go there too."""
        return self.method

    # -- running

    def add(self, trainer: Any, **changes: Any) -> TermHandle:
        """Add the term to a trainer, with ``changes`` to its options."""
        import hfplug.losses

        options = {"weight": self.weight, **self.options, **changes}
        term = self.term(**options)
        return hfplug.losses.add(trainer, term, **(options if isinstance(term, str) else {}))

    def train(self, *, sft: bool = False, on: bool = True, model: Any = None, changes: Any = None, **settings: Any) -> Any:
        """A trainer that has trained, by default one SGD step on eight rows of different lengths."""
        trainer = tiny_trainer(self.model() if model is None else model, sft=sft, **one_step(**settings))
        if on:
            trainer.hfplug_handle = self.add(trainer, **(changes or {}))
        trainer.train()
        return trainer

    @property
    def metric(self) -> str:
        """The name the term is logged under."""
        return f"{self.method}/loss"

    def assert_equal(self, a: Any, b: Any, bound: float = 1e-6) -> None:
        """Parameters and the logged term within ``bound``, the logged loss within 1e-5 (it is rounded in fp32 sums)."""
        assert _difference(a.model, b.model) <= bound
        ours, theirs = _logs(a, self.metric), _logs(b, self.metric)
        assert ours
        assert len(ours) == len(theirs)
        assert max(abs(x - y) for x, y in zip(ours, theirs, strict=True)) <= bound
        assert max(abs(x - y) for x, y in zip(_logs(a, "loss"), _logs(b, "loss"), strict=True)) <= 1e-5

    # -- the contract

    @trainers
    def test_weight_0_is_the_stock_trainer(self, sft: bool) -> None:
        """Bit for bit, with nothing installed; and with a weight the step is another one."""
        stock = self.train(sft=sft, on=False)
        off = self.train(sft=sft, changes={"weight": 0.0})
        assert _difference(stock.model, off.model) == 0.0
        assert _logs(stock, "loss") == _logs(off, "loss")
        assert not _logs(off, self.metric)
        assert _difference(stock.model, self.train(sft=sft).model) > 1e-5

    @trainers
    def test_the_term_is_added_with_its_weight(self, sft: bool) -> None:
        """Logged loss = stock loss + weight * logged term, of the same weights."""
        stock, on = self.train(sft=sft, on=False), self.train(sft=sft, changes={"weight": 0.5})
        expected = _logs(stock, "loss")[0] + 0.5 * _logs(on, self.metric)[0]
        assert abs(_logs(on, "loss")[0] - expected) <= 1e-5

    @trainers
    def test_b35_accumulation(self, sft: bool) -> None:
        """8x1, 2x4 and 1x8 micro-batches with uneven label counts give one step."""
        whole = self.train(sft=sft, per_device_train_batch_size=8)
        for size in (2, 1):
            parts = self.train(sft=sft, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
            self.assert_equal(whole, parts)

    def test_b33_short_last_window(self) -> None:
        """Ten rows as 4 + 4 + 2, whole and in micro-batches of one."""
        same: dict[str, Any] = {"train_dataset": tiny_lm_dataset(10), "max_steps": 3}
        self.assert_equal(self.train(**same), self.train(**same, per_device_train_batch_size=1, gradient_accumulation_steps=4))

    def test_b33_metric_once_per_logging_step(self) -> None:
        """Two windows of two steps each: two entries, in ``log_history`` and on disk, each the mean of its window."""
        every = self.train(max_steps=4, train_dataset=tiny_lm_dataset(16), learning_rate=0.0)
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
        pairs = self.train(max_steps=4, train_dataset=tiny_lm_dataset(16), learning_rate=0.0, logging_steps=2, **saving)
        assert [e["step"] for e in pairs.state.log_history if self.metric in e] == [2, 4]
        assert len(_logs(every, self.metric)) == 4
        steps = _logs(every, self.metric)
        for window, value in zip((steps[:2], steps[2:]), _logs(pairs, self.metric), strict=True):
            assert min(window) < value < max(window)
        saved = json.loads((Path(pairs.args.output_dir) / "checkpoint-4" / "trainer_state.json").read_text())
        assert [e[self.metric] for e in saved["log_history"] if self.metric in e] == _logs(pairs, self.metric)

    def test_b33_padding(self) -> None:
        """Padding to 16 or 64, right or left, leaves the logged term alone; right padding also the step."""
        plain = self.train(data_collator=PadTo(16))
        self.assert_equal(plain, self.train(data_collator=PadTo(64)))
        for length in (16, 64):
            left = self.train(data_collator=PadTo(length, "left"))
            assert abs(_logs(left, self.metric)[0] - _logs(plain, self.metric)[0]) <= 1e-6

    def test_packing_equals_separate(self) -> None:
        """Documents in one row with positions that restart, against one document per row."""
        separate = self.train(sft=True, per_device_train_batch_size=8)
        free = self.train(sft=True, per_device_train_batch_size=8, padding_free=True, max_length=None)
        self.assert_equal(separate, free)
        packed = self.train(sft=True, per_device_train_batch_size=8, packing=True, max_length=32)
        assert len(packed.train_dataset) < 8
        self.assert_equal(separate, packed)

    @trainers
    @pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
    def test_b56_gradient_checkpointing(self, sft: bool, reentrant: bool) -> None:
        """On equals off; the term is counted once."""
        kwargs = {"use_reentrant": reentrant}
        on = self.train(sft=sft, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
        assert on.model.is_activation_checkpointing
        self.assert_equal(self.train(sft=sft), on)

    @trainers
    def test_undo(self, sft: bool) -> None:
        """Before training it leaves no trace; the step that follows is the stock one."""
        stock = self.train(sft=sft, on=False)
        trainer = tiny_trainer(self.model(), sft=sft, **one_step())
        before = snapshot(trainer)
        handle = self.add(trainer)
        with pytest.raises(AssertionError):  # the comparison sees the term
            assert_unchanged(before, snapshot(trainer))
        handle.undo()
        assert_unchanged(before, snapshot(trainer))
        handle.undo()
        trainer.train()
        assert _difference(stock.model, trainer.model) == 0.0

    @trainers
    def test_the_model_is_stock_again_after_training(self, sft: bool) -> None:
        """The names of modules and weights are the architecture's, no hook stays, undo still works."""
        trainer = self.train(sft=sft)
        plain = self.model()
        assert list(trainer.model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in trainer.model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
        assert not any(name.startswith("_hfplug") for m in trainer.model.modules() for name in vars(m))
        assert math.isfinite(trainer.evaluate()["eval_loss"])
        with pytest.raises(UnsupportedError, match="ended with the previous train"):
            trainer.train()
        trainer.hfplug_handle.undo()
        assert "compute_loss" not in vars(trainer)
        trainer.train()

    @trainers
    def test_b36_evaluation(self, sft: bool) -> None:
        """``eval_loss`` is the stock loss; the term stands beside it; outputs come back where they are asked for."""
        stock, on = (tiny_trainer(self.model(), sft=sft) for _ in range(2))
        self.add(on)
        expected, found = stock.evaluate(), on.evaluate()
        assert found["eval_loss"] == expected["eval_loss"]
        assert not [k for k in expected if self.metric in k]
        assert [k for k in on.state.log_history[-1] if self.metric in k] == [f"eval_{self.metric}"]
        batch = next(iter(on.get_eval_dataloader()))
        on.model.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TRL will stop returning outputs
            loss, outputs = on.compute_loss(on.model, dict(batch), return_outputs=True)
        assert float(loss.detach()) == pytest.approx(float(on.compute_loss(on.model, dict(batch)).detach()), abs=1e-6)
        assert outputs.logits.shape[:2] == batch["input_ids"].shape

    @pytest.mark.parametrize("kind", ["full", "lora"])
    def test_b52_resume(self, kind: str, tmp_path: Path) -> None:
        """Four steps equal two, a restart and two more, bit for bit."""

        def build(folder: str) -> Any:
            trainer = tiny_trainer(
                _peft(self.model()) if kind == "lora" else self.model(), sft=kind == "lora", output_dir=tmp_path / folder,
                save_strategy="steps", save_steps=2, logging_steps=1, optim="adamw_torch", lr_scheduler_type="linear",
            )  # fmt: skip
            self.add(trainer)
            return trainer

        whole, again = build("whole"), build("whole")
        whole.train()
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert _difference(whole.model, again.model) == 0.0
        assert _logs(whole, self.metric) == _logs(again, self.metric)
        file = tmp_path / "whole" / "checkpoint-2" / f"hfplug_aux_{self.method}.safetensors"
        has_auxiliary = self.add(tiny_trainer(self.model())).auxiliary is not None
        assert file.is_file() == has_auxiliary
        if has_auxiliary:
            file.unlink()
            with pytest.raises(ConfigError, match=file.name):
                build("whole").train(resume_from_checkpoint=str(file.parent))

    @pytest.mark.parametrize("kind", ["full", "lora"])
    def test_saved_model_has_no_extra_keys(self, kind: str, tmp_path: Path) -> None:
        """What is saved during and after training holds the names stock training saves, and loads without complaint."""
        from safetensors import safe_open

        names = []
        for on in (False, True):
            model = _peft(self.model()) if kind == "lora" else self.model()
            folder = tmp_path / str(on)
            trainer = self.train(on=on, model=model, output_dir=folder, save_strategy="steps", save_steps=1)
            trainer.save_model(str(folder / "last"))
            file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
            for saved in ("checkpoint-1", "last"):
                with safe_open(folder / saved / file, "pt") as tensors:
                    names.append(sorted(tensors.keys()))
        assert all(n == names[0] for n in names)
        if kind == "full":
            _, info = type(self.model()).from_pretrained(tmp_path / "True" / "checkpoint-1", output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
