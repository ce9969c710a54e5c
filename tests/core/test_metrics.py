"""Metrics of losses and callbacks: sums and counts, delivered once, into every place a user looks."""

from __future__ import annotations

import gc
import json
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback, TrainerState

from hfplug import ConfigError
from hfplug.metrics import deliver, metrics_of, relay_class
from hfplug.testing import models


def drained(state, mode="train"):
    return metrics_of(state).drain(mode)


def test_the_value_is_the_sum_over_the_count():
    state = TrainerState()
    for total, count in ((6.0, 2), (torch.tensor(3.0), torch.tensor(7)), (1, 1.0)):
        metrics_of(state).add("a", total, count)
    metrics_of(state).add("mean", 4.0)
    metrics_of(state).add("mean", 2.0)
    assert drained(state) == {"a": 1.0, "mean": 3.0}
    assert drained(state) == {}


@given(
    rows=st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 50)), min_size=1, max_size=300),
    seed=st.integers(0, 10),
)
def test_neither_order_nor_cut_nor_folding_matters(rows, seed):
    totals = {}
    for name, order in (("given", rows), ("shuffled", random.Random(seed).sample(rows, len(rows)))):
        state = TrainerState()
        for total, count in order:
            metrics_of(state).add("a", total, count)
        totals[name] = drained(state)["a"]
    expected = sum(t for t, _ in rows) / sum(c for _, c in rows)
    assert totals["given"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert totals["shuffled"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_small_additions_to_a_large_sum_are_not_lost():
    state = TrainerState()
    metrics_of(state).add("a", torch.tensor(2.0**24), 0)
    for _ in range(1000):
        metrics_of(state).add("a", torch.tensor(1.0), 1)  # in fp32, 2**24 + 1 is 2**24
    assert drained(state)["a"] == (2.0**24 + 1000) / 1000


def test_b32_pending_metrics_do_not_pile_up():
    state = TrainerState()

    def held(times):
        for _ in range(times):
            metrics_of(state).add("a", torch.ones(()), torch.ones(()), "eval")
        gc.collect()
        return sys.getallocatedblocks()

    first = held(1000)
    assert held(10_000) - first < 500
    assert drained(state, "eval") == {"a": 1.0}


def test_what_was_added_is_a_copy():
    state, accumulator = TrainerState(), torch.tensor([5.0, 7.0])
    metrics_of(state).add("a", accumulator[0])
    accumulator.zero_()
    assert drained(state) == {"a": 5.0}


def test_no_graph_is_kept():
    state, weight = TrainerState(), torch.nn.Parameter(torch.tensor(3.0))
    metrics_of(state).add("a", weight * 2, weight)
    assert not any(v.requires_grad for rows in metrics_of(state)._pending["train"].values() for row in rows for v in row)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"total": torch.ones(3)}, r"total of shape \(3,\)"),
        ({"total": 1.0, "count": torch.ones(0)}, r"count of shape \(0,\)"),
        ({"total": "1"}, "total='1' .str."),
        ({"total": None}, "total=None"),
        ({"total": 1.0, "mode": "evel"}, "did you mean 'eval'"),
    ],
)
def test_wrong_values_are_refused_when_added(arguments, words):
    with pytest.raises(ConfigError, match=words):
        metrics_of(TrainerState()).add("a", **arguments)


def test_a_count_of_zero_is_not_logged():
    state = TrainerState()
    metrics_of(state).add("a", 0.0, 0)
    assert drained(state) == {}


def test_pending_metrics_are_not_part_of_the_saved_state(tmp_path):
    state = TrainerState()
    metrics_of(state).add("a", 1.0)
    state.save_to_json(str(tmp_path / "state.json"))
    assert "hfplug" not in (tmp_path / "state.json").read_text()
    assert not metrics_of(TrainerState.load_from_json(str(tmp_path / "state.json")))


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ({"loss": 1.0}, {"a": 1.0}),
        ({"eval_loss": 1.0, "eval_runtime": 2.0}, {"eval_a": 2.0}),
        ({"test_loss": 1.0, "test_runtime": 2.0}, {"test_a": 2.0}),
        ({"eval_cats_runtime": 2.0}, {"eval_cats_a": 2.0}),
        ({"train_runtime": 2.0, "train_loss": 1.0}, {}),
        ({"mine": 1.0}, {}),
    ],
)
def test_each_kind_of_log_takes_its_own(logs, expected):
    state, given_logs = TrainerState(), dict(logs)
    state.log_history.append(dict(logs))
    metrics_of(state).add("a", 1.0)
    metrics_of(state).add("a", 2.0, mode="eval")
    assert deliver(state, logs) is bool(expected)
    assert logs == given_logs | expected
    assert state.log_history == [given_logs | expected]
    taken = {"train" if name == "a" else "eval" for name in expected}
    assert {mode for mode, waiting in metrics_of(state)._pending.items() if waiting} == {"train", "eval"} - taken


class Adds(TrainerCallback):
    """Adds in training and in evaluation, as hfplug's losses do, and stands behind the tracker."""

    def on_substep_end(self, args, state, control, **kwargs):
        metrics_of(state).add("a", state.global_step + 1.0)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        metrics_of(state).add("a", state.global_step + 1.0)

    def on_prediction_step(self, args, state, control, **kwargs):
        metrics_of(state).add("a", 10.0, 2, mode="eval")


@pytest.mark.parametrize("sft", [False, True])
def test_b30_every_place_and_once(sft, tmp_path):
    tracker = models.recording_tracker()()
    trainer = models.tiny_trainer(
        models.tiny_llama(), [tracker, Adds()], sft=sft, output_dir=tmp_path, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
    )  # fmt: skip
    trainer.train()
    returned = trainer.evaluate()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    # Steps 1 and 2, then 3 and 4, then an evaluation; the closing summary takes nothing.
    for place in (trainer.state.log_history, tracker.seen, saved):
        found = [{k: v for k, v in entry.items() if k in {"a", "eval_a"}} for entry in place]
        assert found[:3] == [{"a": 1.5}, {"a": 3.5}, {"eval_a": 5.0}]
        assert not any(found[3:4])
    assert returned["eval_a"] == 5.0


def test_the_relay_stands_before_every_tracker():
    trainer = models.tiny_trainer(models.tiny_llama(), [models.recording_tracker()()])
    kinds = [type(c) for c in trainer.callback_handler.callbacks]
    assert kinds.index(relay_class()) == 1  # behind the flow callback that decides when to log


def test_two_trainers_do_not_mix():
    first, second = (models.tiny_trainer(models.tiny_llama(), [Adds()] * n) for n in (1, 0))
    first.train()
    second.train()
    assert all("a" in e for e in first.state.log_history if "loss" in e)
    assert not any("a" in e for e in second.state.log_history)
