"""The contract of a trainer. A method's test joins it in a few lines::

    class TestTGPO(TrainerContract):
        method = "tgpo"
        neutral = {"tgpo_gate": "const:1", "tgpo_surrogate": "clip", "tgpo_kappa": None}   # the stock trainer
        options = {"tgpo_tau": 0.2}                                                        # the method, switched on

The task is that of the trainer; model, rows, settings and further arguments of the constructor are those of
:mod:`hfplug.testing.trainer_kits`, and each can be replaced by overriding one method.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hfplug.errors import ConfigError
from hfplug.method import Kind
from hfplug.plugins import catalogue
from hfplug.testing import models, trainer_kits

TUNERS = [entry.method.name for entry in catalogue().of_kind(Kind.TUNER)]
_TIMES = ("_runtime", "_per_second", "step_time", "total_flos", "epoch")


class TrainerContract:
    """Properties of every trainer, on tiny models in fp32.

    Attributes:
        method: name of the method.
        neutral: fields of its config with which it is the stock trainer.
        options: fields with which it is not.
        columns: columns of the training data that are the method's own, and that evaluation must do without.
        rows_of_a_window: rows of one optimizer step, cut in the ways of the accumulation test.
        dense: whether the method trains every parameter that the stock trainer trains.
    """

    method: ClassVar[str]
    neutral: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[Sequence[str]] = ()
    rows_of_a_window: ClassVar[int] = 8
    dense: ClassVar[bool] = True

    # -- what a subclass may replace

    def trainer_class(self) -> type[Any]:
        """The trainer under test."""
        return catalogue().get(self.method, Kind.TRAINER).load_target()

    def config_class(self) -> type[Any]:
        """Its config."""
        return catalogue().get(self.method, Kind.TRAINER).load_config()

    def model(self) -> Any:
        """A new model, the same every time."""
        return trainer_kits.model(self.task)

    def rows(self, count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of the training data, with the method's own columns (at values that are not all neutral)."""
        return trainer_kits.rows(self.task, count, seed)

    def neutral_rows(self, count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
        """Rows with which the neutral setting is the stock trainer; it gets them without the method's columns."""
        return self.rows(count, seed)

    def settings(self) -> dict[str, Any]:
        """Fields of the stock config."""
        return trainer_kits.settings(self.task)

    def arguments(self) -> dict[str, Any]:
        """Further arguments of the constructor."""
        return dict(trainer_kits.arguments(self.task))

    def tuner(self, name: str) -> Any:
        """The ``PeftConfig`` of a tuner that is installed; override for one that needs more than a rank."""
        import hfplug.tuners
        from hfplug.seams.trainer import task

        chosen = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": task(self.task).task_type}
        return hfplug.tuners.config(type=name, **chosen)

    # -- running

    @property
    def task(self) -> str:
        """The task of TRL whose trainer this one extends."""
        from hfplug.seams.trainer import task_of

        return task_of(self.trainer_class())

    def build(
        self, options: Mapping[str, Any] | None = None, *, stock: bool = False, rows: Any = None, eval_rows: Any = None,
        model: Any = None, output_dir: Path | None = None, arguments: Mapping[str, Any] | None = None, **settings: Any,
    ) -> Any:  # fmt: skip
        """A trainer that has not trained. Its gradients of each step go to ``trainer.hfplug_gradients``.

        Args:
            options: the method's fields; default: :attr:`options`.
            stock: build TRL's trainer instead; columns of the method are taken off its rows.
            settings: fields of the stock config.
        """
        from datasets import Dataset
        from transformers import PrinterCallback

        from hfplug.seams.trainer import stock_config, stock_trainer

        cls = stock_trainer(self.task) if stock else self.trainer_class()
        config = stock_config(self.task) if stock else self.config_class()
        chosen = {} if stock else dict(self.options if options is None else options)
        owned = tempfile.TemporaryDirectory() if output_dir is None else None
        folder = str(output_dir if owned is None else owned.name)
        data = self.rows() if rows is None else rows
        if stock:
            data = self._without_columns(data)
        evaluation = self._without_columns(self.rows(4, seed=1)) if eval_rows is None else eval_rows
        tape = _gradients()()
        models._set_imports_aside(True)
        trainer = cls(
            model=self.model() if model is None else model,
            args=config(**{"output_dir": folder, **self.settings(), **settings, **chosen}),
            train_dataset=Dataset.from_list(data), eval_dataset=Dataset.from_list(evaluation), callbacks=[tape],
            **{**self.arguments(), **(arguments or {})},
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.hfplug_output, trainer.hfplug_gradients = owned, tape.steps
        return trainer

    def train(self, options: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        """A trainer that has trained; arguments as of :meth:`build`."""
        trainer = self.build(options, **settings)
        trainer.train()
        return trainer

    def _without_columns(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key not in self.columns} for row in rows]

    @staticmethod
    def metrics(trainer: Any, own: str = "") -> list[dict[str, float]]:
        """What was logged, but for times; with ``own``, without the method's metrics of that name."""
        return [
            {k: float(v) for k, v in entry.items()
             if isinstance(v, (int, float)) and not k.endswith(_TIMES) and not (own and own in k)}
            for entry in trainer.state.log_history if "train_runtime" not in entry
        ]  # fmt: skip

    def assert_equal(self, a: Any, b: Any, bound: float = 1e-6, own: str = "", but: Sequence[str] = ()) -> None:
        """Gradients of every step, and every logged metric but those named in ``but``, within ``bound``."""
        assert a.hfplug_gradients
        assert len(a.hfplug_gradients) == len(b.hfplug_gradients)
        for one, other in zip(a.hfplug_gradients, b.hfplug_gradients, strict=True):
            assert furthest(one, other) <= bound
        ours, theirs = self.metrics(a, own), self.metrics(b, own)
        assert len(ours) == len(theirs)
        for mine, other_log in zip(ours, theirs, strict=True):
            assert mine.keys() - set(but) == other_log.keys() - set(but)
            for key in mine.keys() - set(but):
                assert mine[key] == pytest.approx(other_log[key], rel=bound, abs=bound, nan_ok=True), key

    def assert_same_logs(self, a: Any, b: Any) -> None:
        """Every logged metric equal, but for the running total of tokens, which TRL starts again when it resumes."""
        logs = [[{k: v for k, v in e.items() if k != "num_tokens"} for e in self.metrics(t)] for t in (a, b)]
        assert len(logs[0]) == len(logs[1])
        for one, other in zip(*logs, strict=True):
            assert one == pytest.approx(other, abs=0, nan_ok=True)

    # -- the contract

    def test_neutral_is_the_stock_trainer(self) -> None:
        """Loss, metrics and the gradient of every step; and switched on the gradient is another one."""
        stock = self.train(stock=True, rows=self.neutral_rows())
        neutral = self.train(self.neutral, rows=self.neutral_rows())
        self.assert_equal(neutral, stock, own=f"{self.method}/")
        assert max(map(furthest, self.train().hfplug_gradients, stock.hfplug_gradients)) > 1e-5

    def test_what_should_move_moves_and_nothing_else(self) -> None:
        """Every trainable parameter has another value after the steps, no other tensor of any model has."""
        trainer = self.build()
        trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        others = [(f"{owner}.{n}", t) for owner, m in self._further_models(trainer) for n, t in m.state_dict().items()]
        held = {name: (tensor, tensor.detach().clone()) for name, tensor in others}
        trainer.train()
        found = dict(trainer.model.named_parameters())
        still = [n for n, before in trained.items() if bool((found[n] == before).all())]
        if not self.dense:
            still = [n for n in still if n not in self._still_in_stock()]
        assert not still, f"did not move: {still}"
        assert not [n for n, (now, before) in held.items() if not bool((now == before).all())]

    def _further_models(self, trainer: Any) -> list[tuple[str, Any]]:
        from torch import nn

        return [(n, v) for n, v in vars(trainer).items() if isinstance(v, nn.Module) and n not in ("model", "model_wrapped")]

    def _still_in_stock(self) -> set[str]:
        model = self.model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        after = dict(self.train(stock=True, model=model).model.named_parameters())
        return {n for n, p in before.items() if bool((after[n] == p).all())}

    @pytest.mark.parametrize("size", [4, 2, 1])
    def test_b35_accumulation(self, size: int) -> None:
        """One window of rows of uneven length, whole and in micro-batches of 4, 2 and 1."""
        window = self.rows_of_a_window
        whole = self.train(per_device_train_batch_size=window)
        parts = self.train(per_device_train_batch_size=size, gradient_accumulation_steps=window // size)
        for one, other in zip(whole.hfplug_gradients, parts.hfplug_gradients, strict=True):
            assert furthest(one, other) <= 1e-6
        losses = [[e["loss"] for e in self.metrics(t) if "loss" in e] for t in (whole, parts)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # a sum of rounded fp32 numbers

    def test_b52_resume(self, tmp_path: Path) -> None:
        """Four steps equal two, a restart and two more, bit for bit."""
        args: dict[str, Any] = {
            "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4, "optim": "adamw_torch",
            "lr_scheduler_type": "linear",
        }  # fmt: skip
        straight = self.train(output_dir=tmp_path / "straight", **args)
        resumed = self.build(output_dir=tmp_path / "resumed", **args)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
        assert len(resumed.hfplug_gradients) == 2
        ours, theirs = dict(straight.model.named_parameters()), dict(resumed.model.named_parameters())
        assert furthest(ours, theirs) == 0.0
        self.assert_same_logs(straight, resumed)

    @pytest.mark.parametrize("name", TUNERS)
    def test_peft_with_every_tuner(self, name: str) -> None:
        """The adapter moves, the base does not; the loss is finite."""
        import hfplug.tuners

        alone = {"ref_model": None} if self.task == "dpo" else {}  # the model without its adapter is the reference
        trainer = self.build(arguments={"peft_config": self.tuner(name), **alone})
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
        hfplug.tuners.prepare(trainer)
        trainer.train()
        after = dict(trainer.model.named_parameters())
        moved = [n for n, p in before.items() if not bool((p == after[n]).all())]
        assert moved, "nothing moved"
        assert set(moved) <= set(trained)
        assert all(math.isfinite(entry["loss"]) for entry in self.metrics(trainer) if "loss" in entry)

    def test_b36_evaluation(self) -> None:
        """Without the method's columns: a finite ``eval_loss``, in the neutral setting the stock one; no gradient is left."""
        import torch

        def evaluated(trainer: Any) -> float:
            torch.manual_seed(0)  # completions are drawn for it
            return float(trainer.evaluate()["eval_loss"])

        stock, neutral, on = self.build(stock=True), self.build(self.neutral), self.build()
        assert evaluated(neutral) == pytest.approx(evaluated(stock), abs=1e-6)
        assert math.isfinite(evaluated(on))
        assert all(p.grad is None for p in on.model.parameters())

    def test_b36_return_outputs(self) -> None:
        """``return_outputs=True`` gives the same loss, and outputs as the stock trainer does; or its refusal."""

        def outcome(trainer: Any) -> Any:
            trainer.model.eval()
            batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
            plain = float(trainer.compute_loss(trainer.model, _copy(batch)).detach())
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # TRL will stop returning outputs
                    loss, outputs = trainer.compute_loss(trainer.model, _copy(batch), return_outputs=True)
            except (ValueError, NotImplementedError) as error:
                return type(error)
            assert float(loss.detach()) == pytest.approx(plain, abs=1e-6)
            return type(outputs)

        assert outcome(self.build()) is outcome(self.build(stock=True))

    def test_b33_padding(self) -> None:
        """Rows padded to 16 and to 64: the same gradients and metrics."""
        names = {f.name for f in dataclasses.fields(self.config_class())}
        if "pad_to_multiple_of" not in names:
            pytest.skip(f"{self.config_class().__name__} cannot pad")
        short, long = (self.train(pad_to_multiple_of=n) for n in (16, 64))
        self.assert_equal(short, long)

    def test_config_is_saved_and_loaded(self, tmp_path: Path) -> None:
        """The config in ``training_args.bin`` and as a dictionary comes back with every field of its own."""
        import torch

        from hfplug.options import build
        from hfplug.seams.trainer import own_fields

        trainer = self.build(output_dir=tmp_path / "run")
        trainer.save_model(str(tmp_path / "model"))
        saved = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
        assert type(saved) is self.config_class()
        names = own_fields(self.config_class())
        assert set(self.options) <= {f.name for f in dataclasses.fields(saved)}
        values = {name: getattr(trainer.args, name) for name in names}
        assert {name: getattr(saved, name) for name in names} == values
        written = trainer.args.to_dict()
        again = build(self.config_class(), {**self.settings(), "output_dir": "x", **{n: written[n] for n in names}})
        assert {name: getattr(again, name) for name in names} == values

    def test_the_config_is_strict(self) -> None:
        """A wrong type in a field of its own, an unknown field, and TRL's own config in its place are refused by name."""
        from hfplug.options import build
        from hfplug.seams.trainer import own_fields, stock_config

        config = self.config_class()
        for name in own_fields(config):
            with pytest.raises(ConfigError, match=name):
                config(output_dir="x", use_cpu=True, **{name: object()})
        name = own_fields(config)[0]
        with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
            build(config, {"output_dir": "x", name + "x": 1})
        stock = stock_config(self.task)(output_dir="x", **self.settings())
        with pytest.raises(ConfigError, match=config.__name__):
            self.trainer_class()(model=self.model(), args=stock, **self.arguments())


def furthest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Largest absolute difference of two mappings of tensors, which must have the same names; NaN is an error."""
    assert a.keys() == b.keys(), f"different names: {sorted(a.keys() ^ b.keys())}"
    apart = [float((a[name] - b[name]).detach().abs().max()) for name in a]
    assert apart
    assert all(map(math.isfinite, apart)), "not finite"  # max() would pass over a NaN
    return max(apart)


def _copy(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if hasattr(value, "clone") else value for key, value in batch.items()}


def _gradients() -> type[Any]:
    """A callback class that keeps a copy of every gradient of each optimizer step in ``steps``."""
    from transformers import TrainerCallback

    class Gradients(TrainerCallback):
        """Keeps what the optimizer is given."""

        def __init__(self) -> None:
            self.steps: list[dict[str, Any]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            """Copy the gradients."""
            self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    return Gradients
