"""The base of callbacks: what it guards, restores and removes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from transformers import TrainerCallback

from hfplug import ConfigError, HfplugError
from hfplug import activation as hfplug_activation
from hfplug.metrics import metrics_of, relay_class
from hfplug.seams.callback import HfplugCallback
from hfplug.testing import models
from hfplug.testing.callback import hfplug_warnings, structure


@dataclass
class Options:
    scale: float = 1.0
    names: tuple[str, ...] = ()
    inner: dict[str, int] = field(default_factory=dict)


class Toy(HfplugCallback):
    """Counts forwards of a layer, keeps a running state, logs both."""

    method = "toy"
    config_class = Options
    state_attributes = ("forwards", "norms")

    def __init__(self, config=None, **options):
        super().__init__(config, **options)
        self.forwards, self.norms = 0, torch.zeros(2, dtype=torch.bfloat16)

    def on_train_begin(self, args, state, control, **kwargs):
        for index, layer in enumerate(self.scope.stack.layers):
            self.hook(layer.self_attn, "forward", lambda _m, _a, out, i=index: self.seen(i, out[0]))

    def seen(self, index, hidden):
        self.forwards += index == 0
        self.norms[index] += hidden.detach().norm().bfloat16()
        self.log_metric(f"toy/norm_{index}", hidden.detach().float().sum(), hidden.shape[0])

    def on_step_end(self, args, state, control, **kwargs):
        self.log_metric("toy/forwards", self.forwards)


# -- the guard -------------------------------------------------------------------------------------------------------


def train(callback, model=None, **args):
    model = model or models.tiny_llama()
    with hfplug_warnings() as warnings:
        trainer = models.tiny_trainer(model, [callback], **args)
        trainer.train()
    return trainer, warnings


class Fails(Toy):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ValueError("no good")


def test_b34_the_warning_says_what_where_when_and_how():
    callback = Fails()
    trainer, warnings = train(callback)
    assert trainer.state.global_step == 4
    first, last = warnings
    assert "callback 'toy' failed in on_step_end after step 2 and is off from here on; training goes on" in first
    assert "Traceback (most recent call last)" in first
    assert 'raise ValueError("no good")' in first
    assert last == "hfplug: callback 'toy' was off for part of this run: ValueError: no good"
    assert isinstance(callback.disabled, ValueError)
    # Metrics added before the error are still logged, none after.
    assert ["toy/norm_0" in entry for entry in trainer.state.log_history[:2]] == [True, False]


def test_an_error_in_a_hook_removes_every_hook_at_once():
    class InHook(Toy):
        def seen(self, index, hidden):
            if self.trainer_state.global_step == 1:
                self.at = structure(self.model), self.model
                raise ValueError("in hook")

    clean, callback = models.tiny_llama(), InHook()
    after = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            after.append(structure(model))

    trainer = models.tiny_trainer(clean, [callback, Look()])
    with hfplug_warnings() as warnings:
        trainer.train()
    assert "failed in a forward hook on LlamaAttention after step 1" in warnings[0]
    plain = models.tiny_trainer(models.tiny_llama(), [])
    plain.train()
    assert after[0] != structure(plain.model)
    assert after[1:] == [structure(plain.model)] * 3


def test_a_hook_cannot_change_the_forward():
    class Returns(Toy):
        def seen(self, index, hidden):
            return (torch.zeros_like(hidden), None)

    plain, _ = train(TrainerCallback())
    trainer, _ = train(Returns())
    assert trainer.state.log_history[0]["loss"] == plain.state.log_history[0]["loss"]


def test_a_critical_callback_may_end_the_run_and_leaves_the_model_clean():
    class Guard(Fails):
        critical = True

    model = models.tiny_llama()
    trainer = models.tiny_trainer(model, [Guard()])
    with pytest.raises(ValueError, match="no good"):
        trainer.train()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_through(interrupt):
    class Stops(Toy):
        def on_step_end(self, args, state, control, **kwargs):
            raise interrupt

    callback = Stops()
    with pytest.raises(interrupt):
        train(callback)
    assert callback.disabled is None


def test_an_interrupted_run_can_be_started_again():
    class StopsOnce(Toy):
        stopped = False

        def on_substep_end(self, args, state, control, **kwargs):
            if not self.stopped:
                self.stopped = True
                raise KeyboardInterrupt

    callback = StopsOnce()
    trainer = models.tiny_trainer(models.tiny_llama(), [callback], gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    callback.forwards = 0
    trainer.train()
    assert callback.forwards == 8  # not counted twice by hooks left over
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_an_error_in_an_event_of_a_mixin_is_guarded_too():
    class Mixin:
        def on_step_begin(self, args, state, control, **kwargs):
            raise ValueError("mixed in")

    class Mixed(Mixin, Toy):
        pass

    _, warnings = train(Mixed())
    assert "failed in on_step_begin" in warnings[0]


def test_super_is_allowed_and_runs_once():
    class Child(Toy):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)

    callback = Child()
    train(callback)
    assert callback.forwards == 4


def test_control_is_passed_on():
    class Stop(Toy):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True
            return control

    trainer, _ = train(Stop())
    assert trainer.state.global_step == 1


def test_an_undo_that_fails_is_reported_and_stops_nothing():
    class BadUndo(Toy):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            self.ledger.run(lambda: None, lambda _: 1 / 0)

    trainer, warnings = train(BadUndo())
    assert trainer.state.global_step == 4
    assert len(warnings) == 1
    assert "ZeroDivisionError" in warnings[0]
    assert not any(module._forward_hooks for module in trainer.model.modules())


# -- hooks and metrics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_b31_hooks_run_once_per_forward_and_backward(reentrant):
    class Counts(Toy):
        def on_train_begin(self, args, state, control, **kwargs):
            self.counts = dict.fromkeys(("attention", "head", "backward"), 0)
            attention = self.scope.stack.layers[0].self_attn
            self.hook(attention, "forward", lambda *_: self.count("attention"))
            # Outside the token stack, where nothing is recomputed.
            self.hook(self.model.lm_head, "forward_pre", lambda *_: self.count("head"))
            self.hook(attention.o_proj, "full_backward", lambda *_: self.count("backward"))

        def count(self, name):
            self.counts[name] += 1

        def on_step_end(self, args, state, control, **kwargs):
            pass

    callback = Counts()
    args = {} if reentrant is None else {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    _, warnings = train(callback, activation_checkpointing=reentrant is not None, gradient_accumulation_steps=2, **args)
    assert not warnings
    assert callback.counts == {"attention": 8, "head": 8, "backward": 8}


def test_a_metric_goes_to_the_mode_the_model_is_in():
    class Both(Toy):
        def on_prediction_step(self, args, state, control, **kwargs):
            self.log_metric("toy/batches", 3.0)

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.shown = metrics

    callback = Both()
    trainer, _ = train(callback, eval_strategy="steps", eval_steps=4)
    entries = [{k for k in e if "toy/" in k} for e in trainer.state.log_history[:3]]
    assert entries[0] == entries[1] == {"toy/norm_0", "toy/norm_1", "toy/forwards"}
    assert entries[2] == {"eval_toy/norm_0", "eval_toy/norm_1", "eval_toy/batches"}
    assert callback.shown["eval_toy/batches"] == 3.0


@pytest.mark.parametrize("kind", ["hook", "log_metric", "scope"])
def test_outside_of_a_run_it_says_so(kind):
    callback = Toy()
    with pytest.raises(HfplugError, match="not in a training run"):
        {
            "hook": lambda: callback.hook(torch.nn.Linear(1, 1), "forward", print),
            "log_metric": lambda: callback.log_metric("a", 1.0),
            "scope": lambda: callback.scope,
        }[kind]()


def test_a_trainer_built_before_hfplug_still_gets_metrics_and_one_warning():
    tracker = models.recording_tracker()()
    trainer = models.tiny_trainer(models.tiny_llama(), [tracker, Toy(), Toy()])
    trainer.remove_callback(relay_class())
    with hfplug_warnings() as warnings:
        trainer.train()
    assert all("toy/norm_0" in e for e in trainer.state.log_history if "loss" in e)
    assert not any("toy/norm_0" in e for e in tracker.seen)
    assert len(warnings) == 1
    assert "import hfplug first" in warnings[0]


def test_with_the_relay_a_callback_delivers_nothing_itself(monkeypatch):
    calls = []
    monkeypatch.setattr("hfplug.seams.callback.deliver", lambda *a: calls.append(a))
    train(Toy())
    assert not calls
    assert "hfplug.metrics" in hfplug_activation.active()


def test_what_is_added_while_logging_waits_for_the_next_log():
    class Late(Toy):
        def on_log(self, args, state, control, logs=None, **kwargs):
            self.log_metric("toy/late", state.global_step)

    trainer, _ = train(Late())
    found = [e.get("toy/late") for e in trainer.state.log_history]
    assert found[:2] == [None, 2.0]


# -- options and state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scal": 2}, "Toy: Options has no option 'scal'.*did you mean 'scale'"),
        ({"scale": "big"}, "scale='big'"),
        ({"config": 3}, "config must be a Options alone, or a mapping; got config of type int"),
        ({"config": Options(), "scale": 2.0}, "and options"),
        ({"config": {"scale": 1.0}, "scale": 2.0}, "not both"),
    ],
)
def test_options_are_strict(given, words):
    with pytest.raises(ConfigError, match=words):
        Toy(**given)


def test_options_in_three_ways():
    assert Toy(scale=2.0).config == Toy({"scale": 2.0}).config == Toy(Options(scale=2.0)).config


def test_state_is_json_and_comes_back_bit_for_bit():
    callback = Toy(names=("a", "b"), inner={"x": 1})
    callback.forwards = 7
    callback.norms = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    again = Toy.from_state(json.loads(json.dumps(callback.state())))
    assert again.config == callback.config
    assert again.forwards == 7
    assert again.norms.dtype == torch.bfloat16
    assert again.norms.view(torch.int16).equal(callback.norms.view(torch.int16))


def test_nested_state():
    class Nested(Toy):
        state_attributes = ("table",)
        table = None

    callback = Nested()
    callback.table = {"a": [torch.arange(3), {"b": torch.tensor(2.0)}], "c": None, "d": "text", "e": True}
    again = Nested.from_state(json.loads(json.dumps(callback.state())))
    assert again.table["a"][0].equal(torch.arange(3))
    assert again.table["a"][1]["b"].equal(torch.tensor(2.0))
    assert {k: again.table[k] for k in "cde"} == {"c": None, "d": "text", "e": True}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "norms is a object"),
        ({1: 2}, "norms has the key 1"),
        ([{"a": {3}}], r"norms\[0\]\['a'\] is a set"),
        (torch.zeros(2**20), "more than 1048576"),
    ],
)
def test_state_that_cannot_be_saved_turns_it_off_and_the_checkpoint_is_kept(value, words, tmp_path):
    class Bad(Toy):
        def on_step_end(self, args, state, control, **kwargs):
            self.norms = value

        def seen(self, index, hidden):
            pass

    with hfplug_warnings() as warnings:
        trainer = models.tiny_trainer(models.tiny_llama(), [Bad()], output_dir=tmp_path, save_strategy="steps", save_steps=2)
        trainer.train()
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()
    assert len(warnings) == 2
    assert "failed in state()" in warnings[0]
    import re

    assert re.search(words, warnings[0])


SAVES = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("restore", [False, True])
def test_b52_changed_options_are_kept_by_default(tmp_path, restore):
    train(Toy(scale=1.0), output_dir=tmp_path, **SAVES)
    callback = Toy(scale=5.0)
    trainer = models.tiny_trainer(
        models.tiny_llama(), [callback], output_dir=tmp_path, restore_callback_states_from_checkpoint=restore
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    running = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Toy))
    assert running.forwards == 4
    # transformers rebuilds the callback from the checkpoint's options where it is asked to restore.
    assert running.config.scale == (1.0 if restore else 5.0)
    assert (running is callback) is not restore


def test_b52_several_of_a_class_get_back_their_own_state(tmp_path):
    def both():
        return [Toy(scale=1.0), Toy(scale=2.0)]

    def run(callbacks, **resume):
        trainer = models.tiny_trainer(models.tiny_llama(), callbacks, output_dir=tmp_path, **SAVES)
        for callback in callbacks:
            callback.forwards = 100 * int(callback.config.scale)
        trainer.train(**resume)
        return [c.forwards for c in callbacks]

    assert run(both()) == [104, 204]
    again = both()[::-1]  # in another order, too
    assert run(again, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == [204, 104]
    again = both()
    assert run(again, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == [104, 204]


def test_b52_options_that_fit_no_saved_state_are_reported(tmp_path):
    trainer = models.tiny_trainer(models.tiny_llama(), [Toy(scale=1.0), Toy(scale=2.0)], output_dir=tmp_path, **SAVES)
    trainer.train()
    callback = Toy(scale=3.0)
    trainer = models.tiny_trainer(models.tiny_llama(), [callback], output_dir=tmp_path)
    with hfplug_warnings() as warnings:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "none with the options" in warnings[0]
    assert trainer.state.global_step == 4


def test_b52_a_callback_added_on_resume_can_be_saved(tmp_path):
    trainer = models.tiny_trainer(models.tiny_llama(), [], output_dir=tmp_path, **SAVES)
    trainer.train()
    callback = Toy()
    trainer = models.tiny_trainer(models.tiny_llama(), [callback], output_dir=tmp_path, **SAVES)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # Trainer alone: KeyError at step 4
    assert callback.forwards == 2
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["Toy"]["attributes"]["forwards"] == 2


def test_metrics_of_a_finished_run_are_all_delivered():
    trainer, _ = train(Toy())
    assert not metrics_of(trainer.state)


def test_the_base_is_offered_where_callbacks_are():
    from hfplug import callbacks

    assert callbacks.HfplugCallback is HfplugCallback
    assert {"HfplugCallback", "SinkMonitorCallback", "SinkMonitorConfig"} <= set(dir(callbacks))
    with pytest.raises(AttributeError, match="did you mean 'SinkMonitorCallback'"):
        callbacks.SinkMonitorCalback  # noqa: B018
