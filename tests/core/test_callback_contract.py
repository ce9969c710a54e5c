"""The contract of callbacks passes a good one and refuses bad ones, each at the property it breaks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback

from hfplug.seams.callback import HfplugCallback
from hfplug.testing.callback import CallbackContract


@dataclass
class Options:
    scale: float = 1.0


class Toy(HfplugCallback):
    """Counts forwards of the layers, keeps a running state, logs both."""

    method = "toy"
    config_class = Options
    state_attributes = ("forwards",)

    def __init__(self, config=None, **options):
        super().__init__(config, **options)
        self.forwards = 0

    def on_train_begin(self, args, state, control, **kwargs):
        for index, layer in enumerate(self.scope.stack.layers):
            self.hook(layer.self_attn, "forward", lambda _m, _a, out, i=index: self.seen(i, out[0]))

    def seen(self, index, hidden):
        self.forwards += index == 0
        self.log_metric(f"toy/norm_{index}", hidden.detach().float().sum(), hidden.shape[0])

    def on_step_end(self, args, state, control, **kwargs):
        self.log_metric("toy/forwards", self.forwards)


class TestToyContract(CallbackContract):
    method = "toy"
    make_callback = staticmethod(lambda: Toy(scale=2))
    # It counts padding and forwards, so these two do not hold for it; below they must say so.
    test_b33_padding_does_not_count = None
    test_b33_cut_into_micro_batches_does_not_count = None
    test_b32_memory_does_not_grow_with_the_window = None  # dear, and met below by one that hoards


class Bare(TrainerCallback):
    """Not on the base: its errors end the run, its metrics are written where nobody looks."""

    method = "bare"

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["bare/step"] = self.step


class Draws(Toy):
    def on_step_begin(self, args, state, control, **kwargs):
        torch.rand(1)


class Hoards(Toy):
    def seen(self, index, hidden):
        super().seen(index, hidden)
        self.__dict__.setdefault("kept", []).append(hidden.detach().clone())


class LeavesHook(Toy):
    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.model.lm_head.register_forward_hook(lambda *_: None)


class Scales(Toy):
    """Changes the gradients it looks at."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            parameter.grad.mul_(1.001)


class Twice(Toy):
    """Registers past the base, so it counts recomputations."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.ledger.hook(self.scope.stack.layers[0].self_attn, "forward_pre", lambda *_: self.count())

    def count(self):
        self.forwards += 1


class Mutes(Toy):
    """Catches its own errors and goes on."""

    def _fail(self, where, error):
        pass


class Forgets(Toy):
    state_attributes = ()


class OnlyOnce(Toy):
    """Logs by hand, and only into what it is shown."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logs["toy/mine"] = 1.0
            state.log_history[-1]["toy/mine"] = 1.0


BAD: list[tuple[type, str, tuple]] = [
    (Bare, "test_b30_metrics_reach_history_file_and_tracker", (True, False)),
    (Draws, "test_training_is_bit_identical", ()),
    (Scales, "test_training_is_bit_identical", ()),
    (Hoards, "test_b32_memory_does_not_grow_with_the_window", ()),
    (LeavesHook, "test_everything_is_removed_after_training", ()),
    (LeavesHook, "test_everything_is_removed_after_an_interrupt", ()),
    (LeavesHook, "test_b34_an_error_in_an_event_turns_it_off", ()),
    (Twice, "test_b31_checkpointing_counts_once", (True,)),
    (Twice, "test_b31_checkpointing_counts_once", (False,)),
    (Toy, "test_b33_padding_does_not_count", ()),
    (Toy, "test_b33_cut_into_micro_batches_does_not_count", ()),
    (Mutes, "test_b34_an_error_in_an_event_turns_it_off", ()),
    (Mutes, "test_b34_an_error_inside_the_model_turns_it_off", ()),
    (OnlyOnce, "test_b30_metrics_reach_history_file_and_tracker", (False, False)),
    (Forgets, "test_b52_two_steps_and_two_more_are_four", (False,)),
]


@pytest.mark.parametrize(("bad", "test", "arguments"), BAD, ids=[f"{b.__name__}-{t[5:]}" for b, t, _ in BAD])
def test_the_contract_refuses(bad, test, arguments, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "hfplug")

    class Contract(CallbackContract):
        method: ClassVar[str] = "toy"
        make_callback = staticmethod(bad)

    needs_folder = "b30" in test or "b52" in test
    with pytest.raises(AssertionError):
        getattr(Contract(), test)(*((tmp_path,) if needs_folder else ()), *arguments)


def test_the_contract_refuses_an_unguarded_callback():
    class Contract(CallbackContract):
        method = "bare"
        make_callback = staticmethod(Bare)

    with pytest.raises(RuntimeError, match="injected by the contract"):
        Contract().test_b34_an_error_in_an_event_turns_it_off()
