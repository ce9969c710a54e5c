"""The loss seam with terms of the tests' own: contract, normalisation, refusals, what is saved, what is undone."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import hfplug
import hfplug.losses
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.losses.nitp.config import NITPConfig
from hfplug.losses.nitp.loss import NITPLoss
from hfplug.metrics import relay_class
from hfplug.positions import token_pairs
from hfplug.seams.loss import LossTerm, Term
from hfplug.testing.loss import LossContract, assert_unchanged, one_step, snapshot
from hfplug.testing.models import PadTo, recording_tracker, tiny_llama, tiny_lm_dataset, tiny_trainer


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_the_tests_make():
    """``Trainer.train`` begins with a garbage collection, which would walk every imported module's objects each time."""
    import trl.trainer.sft_trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    weight: float = 1.0
    inner: bool = False


class Toy(LossTerm):
    """Mean square of the last hidden state, over the labelled positions; with ``inner`` also of one inside a layer."""

    method = "toy"
    config_class = ToyConfig

    def setup(self, model, stack, ledger):
        self.capture(ledger, stack, "last")
        if self.config.inner:
            self.capture(ledger, stack.layers[1].mlp, "inner")

    def compute(self, inputs, call):
        pairs = token_pairs(call, inputs, "labels")
        value = self.captured(call, "last")[:, :-1].square().mean(-1)
        if self.config.inner:
            value = value + self.captured(call, "inner")[:, :-1].square().mean(-1)
        return Term(value[pairs].sum(), pairs.sum())


class MeanReduced(Toy):
    """What a first attempt at a loss term looks like: a mean per micro-batch."""

    def compute(self, inputs, call):
        term = super().compute(inputs, call)
        return Term(term.total / term.count, torch.tensor(1))

    def support(self, batch):
        return torch.tensor(1)


class TestToy(LossContract):
    """A stranger's term, passed as an object, without a module of its own."""

    method = "toy"

    def term(self, **options):
        return Toy(ToyConfig(**options))


class _MeanReducedContract(LossContract):
    method = "toy"

    def term(self, **options):
        return MeanReduced(ToyConfig(**options))


@pytest.mark.parametrize("sft", [False, True])
def test_b35_the_contract_refuses_a_mean_reduced_term(sft):
    contract = _MeanReducedContract()
    with pytest.raises(AssertionError):
        contract.test_b35_accumulation(sft)


def test_the_contract_refuses_a_term_that_counts_padding():
    class Counting(Toy):
        def compute(self, inputs, call):
            value = self.captured(call, "last")[:, :-1].square().mean(-1)
            return Term(value.sum(), torch.tensor(value.numel()))

        def support(self, batch):
            return torch.tensor(batch["input_ids"][:, 1:].numel())

    class Contract(LossContract):
        method = "toy"

        def term(self, **options):
            return Counting(ToyConfig(**options))

    with pytest.raises(AssertionError):
        Contract().test_b33_padding()
    with pytest.raises(AssertionError):
        Contract().test_packing_equals_separate()


# -- normalisation ------------------------------------------------------------------------------------------------------


def summed(outputs, labels, num_items_in_batch=None):
    losses = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


class SequenceMean(Trainer):
    """A per-batch mean that leaves accumulation to the Trainer, as DPO's."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


class OwnScale(Trainer):
    """A loss that says it is scaled already, without using ``num_items_in_batch``, as GRPO's."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs=return_outputs) / self.current_gradient_accumulation_steps


VARIANTS = {
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "sft_label_smoothing": {"label_smoothing_factor": 0.1, "sft": True},
    "sft_dft": {"loss_type": "dft", "sft": True},
    "sequence_mean": {"trainer_class": SequenceMean},
    "own_scale": {"trainer_class": OwnScale},
    "local_tokens": {"average_tokens_across_devices": False},
    "checkpointing": {"activation_checkpointing": True},
}


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor:FutureWarning")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_term_is_the_mean_over_the_window_whatever_the_stock_loss_is(name):
    """What the term adds to a step does not depend on the cut into micro-batches, even where the stock loss does."""
    added = []
    for size in (8, 1):
        pair = []
        for on in (True, False):
            cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "learning_rate": 0.1}
            trainer = tiny_trainer(tiny_llama(num_hidden_layers=4), **one_step(**cut, **VARIANTS[name]))
            if on:
                hfplug.losses.add(trainer, "nitp")
            trainer.train()
            pair.append(weights(trainer))
        added.append(pair[0] - pair[1])
    assert added[0].abs().max() > 1e-4
    assert (added[1] - added[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("accepts", [True, False])
def test_compute_loss_func_is_followed(accepts):
    logs = []
    for on in (False, True):
        trainer = tiny_trainer(tiny_llama(), **one_step(per_device_train_batch_size=2, gradient_accumulation_steps=4))
        trainer.compute_loss_func = summed
        trainer.model_accepts_loss_kwargs = accepts
        if on:
            hfplug.losses.add(trainer, Toy(ToyConfig(weight=0.5)))
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"] + 0.5 * logs[1]["toy/loss"], abs=1e-5)


class Unknown(Toy):
    """A term whose support cannot be read off the batches."""

    def support(self, batch):
        return None


def test_without_known_support_the_window_is_the_mean_of_its_micro_batches():
    rows = tiny_lm_dataset(8)
    logged = []
    for size in (8, 1):
        trainer = tiny_trainer(tiny_llama(), **one_step(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size))
        hfplug.losses.add(trainer, Unknown(ToyConfig()))
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    model, means = tiny_llama(), []
    for row in rows:
        batch = PadTo()([row])
        hidden = model.model(**{k: v for k, v in batch.items() if k != "labels"}).last_hidden_state
        means.append(float(hidden[:, :-1].square().mean().detach()))
    stock = tiny_trainer(tiny_llama(), **one_step(per_device_train_batch_size=8))
    stock.train()
    assert logged[1] - stock.state.log_history[0]["loss"] == pytest.approx(sum(means) / 8, abs=1e-5)
    assert abs(logged[0] - logged[1]) > 3e-5  # rows of different lengths: a mean of means is another figure


# -- wrapping -----------------------------------------------------------------------------------------------------------


def test_b36_signature_and_unknown_arguments_pass_through():
    seen = []

    class Extended(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, *, extra=None, **more):
            seen.append((extra, more))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    trainer = tiny_trainer(tiny_llama(), trainer_class=Extended)
    stock = inspect.signature(trainer.compute_loss)
    hfplug.losses.add(trainer, "nitp")
    assert inspect.signature(trainer.compute_loss) == stock
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model, batch, True, None, extra=3, other=4)
    assert seen == [(3, {"other": 4})]
    assert loss > outputs.loss


def test_the_batch_the_stock_code_sees_is_the_callers():
    trainer = tiny_trainer(tiny_llama(), label_smoothing_factor=0.1)
    hfplug.losses.add(trainer, "nitp")
    batch = dict(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, batch)
    assert "labels" not in batch  # Trainer takes them out; the term kept its own view


def test_two_terms_in_any_order_of_undo():
    def build():
        return tiny_trainer(tiny_llama(num_hidden_layers=4), **one_step())

    both = build()
    hfplug.losses.add(both, "nitp", weight=0.5)
    hfplug.losses.add(both, Toy(ToyConfig(weight=0.25)))
    both.train()
    log = both.state.log_history[0]
    alone = build()
    alone.train()
    expected = alone.state.log_history[0]["loss"] + 0.5 * log["nitp/loss"] + 0.25 * log["toy/loss"]
    assert log["loss"] == pytest.approx(expected, abs=1e-5)
    for first in (0, 1):
        trainer = build()
        batch = dict(next(iter(trainer.get_train_dataloader())))
        losses = [trainer.compute_loss(trainer.model, batch)]
        before = snapshot(trainer)
        handles = [hfplug.losses.add(trainer, "nitp"), hfplug.losses.add(trainer, Toy(ToyConfig()))]
        losses.append(trainer.compute_loss(trainer.model, batch))
        handles[first].undo()
        losses.append(trainer.compute_loss(trainer.model, batch))
        handles[1 - first].undo()
        assert losses[0] < losses[2] < losses[1]
        assert_unchanged(before, snapshot(trainer))


def test_handle_is_a_context_manager():
    trainer = tiny_trainer(tiny_llama())
    before = snapshot(trainer)
    with hfplug.losses.add(trainer, "nitp") as handle:
        assert handle.auxiliary is trainer.model.hfplug_nitp
    assert_unchanged(before, snapshot(trainer))


def test_a_failing_setup_leaves_nothing():
    class Failing(Toy):
        def setup(self, model, stack, ledger):
            super().setup(model, stack, ledger)
            raise RuntimeError("no")

    trainer = tiny_trainer(tiny_llama())
    before = snapshot(trainer)
    with pytest.raises(RuntimeError, match="no"):
        hfplug.losses.add(trainer, Failing(ToyConfig()))
    assert_unchanged(before, snapshot(trainer))


def test_random_streams_are_those_of_the_stock_run():
    """Dropout and data order stay, and the projector does not depend on what was drawn before."""
    state, projectors = [], []
    for _ in range(2):
        torch.rand(3)
        trainer = tiny_trainer(tiny_llama())
        before = torch.get_rng_state()
        projectors.append(hfplug.losses.add(trainer, "nitp").auxiliary.state_dict())
        state.append(torch.equal(before, torch.get_rng_state()))
    assert all(state)
    assert all(torch.equal(projectors[0][name], projectors[1][name]) for name in projectors[0])


def test_metrics_arrive_when_the_trainer_was_built_before_hfplug_was_imported():
    tracker = recording_tracker()()
    trainer = tiny_trainer(tiny_llama(), [tracker], **one_step())
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [c for c in callbacks if not isinstance(c, relay_class())]
    before = list(callbacks)
    handle = hfplug.losses.add(trainer, "nitp")
    trainer.train()
    assert "nitp/loss" in trainer.state.log_history[0]
    assert "nitp/loss" in tracker.seen[0]
    handle.undo()
    assert callbacks == before


def test_predict_does_not_leak_into_the_next_evaluation():
    trainer = tiny_trainer(tiny_llama())
    hfplug.losses.add(trainer, "nitp")
    trainer.evaluate()
    expected = trainer.state.log_history[-1]["eval_nitp/loss"]
    other = trainer.predict(tiny_lm_dataset(4, seed=5)).metrics
    assert other["test_nitp/loss"] != expected
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_nitp/loss"] == expected


def test_inner_states_under_reentrant_checkpointing():
    """Right where transformers checkpoints the layer; refused where the captured state would have no gradient."""

    def build(on, reentrant):
        kwargs = {"use_reentrant": reentrant}
        return tiny_trainer(
            tiny_llama(), **one_step(activation_checkpointing=on, activation_checkpointing_kwargs=kwargs if on else None)
        )

    trainer = build(on=True, reentrant=True)
    hfplug.losses.add(trainer, Toy(ToyConfig(inner=True)))
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        trainer.train()
    on, off = (build(on=flag, reentrant=False) for flag in (True, False))
    for each in (on, off):
        hfplug.losses.add(each, Toy(ToyConfig(inner=True)))
        each.train()
    assert (weights(on) - weights(off)).abs().max() <= 1e-6


def test_stack_hidden_behind_the_trainer_is_an_error():
    class Elsewhere(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model.lm_head.weight.sum()

    trainer = tiny_trainer(tiny_llama(), trainer_class=Elsewhere)
    hfplug.losses.add(trainer, "nitp")
    with pytest.raises(UnsupportedError, match="did not run LlamaModel"):
        trainer.train()


def test_unused_captures_are_not_kept():
    trainer = tiny_trainer(tiny_llama())
    hfplug.losses.add(trainer, "nitp")
    ids = torch.ones(1, 4, dtype=torch.long)
    trainer.model.generate(ids, max_new_tokens=2, do_sample=False)
    trainer.model.train()(ids)
    assert vars(trainer.model.model)["_hfplug_calls"].current.memo == {}


def test_the_namespace_offers_what_a_term_needs():
    assert {"add", "LossTerm", "Term", "TermHandle", "NITPLoss", "NITPConfig"} <= set(dir(hfplug.losses))
    assert hfplug.losses.LossTerm is LossTerm
    with pytest.raises(AttributeError, match="did you mean 'NITPLoss'"):
        hfplug.losses.NITPLos  # noqa: B018


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_wrong_names_options_and_objects():
    trainer = tiny_trainer(tiny_llama())
    before = snapshot(trainer)
    for term, options, message in (
        ("nipt", {}, "did you mean 'nitp'"),
        ("sink_monitor", {}, "not a loss|unknown loss"),
        ("nitp", {"wieght": 1.0}, "did you mean 'weight'"),
        ("nitp", {"weight": "a lot"}, "weight='a lot'"),
        ("nitp", {"pairs": "label"}, "did you mean 'labels'"),
        ("nitp", {"layer": 3}, "layer=3 .* 1 to 2"),
        (NITPLoss(NITPConfig()), {"weight": 1.0}, "belong into the config"),
        (NITPConfig(), {}, "neither the name of a loss nor a LossTerm"),
    ):
        with pytest.raises(ConfigError, match=message):
            hfplug.losses.add(trainer, term, **options)
    with pytest.raises(ConfigError, match="takes a NITPConfig, not a ToyConfig"):
        NITPLoss(ToyConfig())
    with pytest.raises(ConfigError, match="not a transformers Trainer"):
        hfplug.losses.add(trainer.model, "nitp")
    assert_unchanged(before, snapshot(trainer))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("is_fsdp_enabled", True, "FSDP"),
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("args._n_gpu", 2, "DataParallel"),
        ("args.torch_compile", True, "torch_compile"),
        ("model_init", tiny_llama, "model_init"),
        ("get_cp_size", lambda: 2, "context parallelism of 2"),
        ("get_sp_size", lambda: 2, "sequence parallelism of 2"),
        ("get_tp_size", lambda: 2, "tensor parallelism of 2"),
    ],
)
def test_unsupported_trainers_are_refused(attribute, value, message, monkeypatch):
    trainer = tiny_trainer(tiny_llama())
    target = trainer.args if attribute.startswith("args.") else trainer
    monkeypatch.setattr(target, attribute.removeprefix("args."), value)
    before = snapshot(trainer)
    with pytest.raises(UnsupportedError, match=message):
        hfplug.losses.add(trainer, "nitp")
    assert_unchanged(before, snapshot(trainer))


def test_refused_twice_and_after_the_optimizer():
    trainer = tiny_trainer(tiny_llama())
    handle = hfplug.losses.add(trainer, "nitp")
    with pytest.raises(UnsupportedError, match="already"):
        hfplug.losses.add(trainer, "nitp")
    toy = hfplug.losses.add(trainer, Toy(ToyConfig()))
    with pytest.raises(UnsupportedError, match="already"):  # also without a module of its own
        hfplug.losses.add(trainer, Toy(ToyConfig()))
    toy.undo()
    handle.undo()
    trainer.create_optimizer()
    with pytest.raises(UnsupportedError, match="optimizer already"):
        hfplug.losses.add(trainer, "nitp")


def test_begin_notices_a_replaced_model_and_a_selective_optimizer():
    class Selective(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.lm_head.parameters(), lr=0.1)
            return self.optimizer

    trainer = tiny_trainer(tiny_llama(), trainer_class=Selective)
    hfplug.losses.add(trainer, "nitp")
    with pytest.raises(UnsupportedError, match="create_optimizer left out"):
        trainer.train()
    trainer = tiny_trainer(tiny_llama())
    hfplug.losses.add(trainer, "nitp")
    trainer.model = trainer.model_wrapped = tiny_llama()
    with pytest.raises(UnsupportedError, match="model was replaced"):
        trainer.train()


def test_weight_0_says_so(caplog):
    trainer = tiny_trainer(tiny_llama())
    before = snapshot(trainer)
    with caplog.at_level(logging.INFO, "hfplug.seams.loss"):
        handle = hfplug.losses.add(trainer, "nitp", weight=0)
    assert "left as it is" in caplog.text
    assert_unchanged(before, snapshot(trainer))
    assert handle.auxiliary is None
    handle.undo()


def test_a_callback_after_ours_still_runs_at_the_end_of_training():
    ended = []

    class Last(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            ended.append(hasattr(kwargs["model"], "hfplug_nitp"))

    trainer = tiny_trainer(tiny_llama(), **one_step())
    hfplug.losses.add(trainer, "nitp")
    trainer.add_callback(Last())
    trainer.train()
    assert ended == [False]
