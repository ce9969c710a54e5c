"""DRIFT: the contract of trainers, the loss against the written-out reference, and what its card asks for."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import peft
import pytest
import torch
from trainer_kit import TrainerContract

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers.drift import reference
from hfplug.trainers.drift.config import DRIFTConfig
from hfplug.trainers.drift.data import to_drift_dataset
from hfplug.trainers.drift.trainer import DRIFTTrainer, WeightCollator, _Weighted

WEIGHTS = (0.25, 3.0, 0.0, 1.5, 0.75, 2.0, 0.5, 1.0)
KINDS = ("sequence", "token", "weight")


class Weighted(TrainerContract):
    method = "drift"
    neutral: ClassVar[dict[str, Any]] = {"drift_normalization": "token"}
    columns = ("weight",)

    def __init__(self, weights: tuple[float, ...] = WEIGHTS) -> None:
        self.weights = weights

    def rows(self, count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
        rows = super().rows(count, seed)
        return [{**row, "weight": self.weights[i % len(self.weights)]} for i, row in enumerate(rows)]

    def neutral_rows(self, count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
        return [{**row, "weight": 1.0} for row in super().rows(count, seed)]


class TestDRIFT(Weighted):
    """The paper's normalisation."""

    __init__ = object.__init__  # pytest collects no class with a constructor
    weights = WEIGHTS


KIT = Weighted()


def gradients(weights: tuple[float, ...] = WEIGHTS, kind: str = "sequence", **settings: Any) -> dict[str, torch.Tensor]:
    kit = Weighted(weights)
    return kit.train({"drift_normalization": kind}, **settings).hfplug_gradients[0]


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """RMS of the difference over that of ``b``."""
    assert a.keys() == b.keys()
    one, other = (torch.cat([g[n].double().flatten() for n in sorted(a)]) for g in (a, b))
    return float((one - other).norm() / other.norm())


# -- the loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_reference(kind: str) -> None:
    """Loss and gradient of a step, rows one at a time and unpadded in float64."""
    trainer = KIT.build({"drift_normalization": kind}, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    rows = list(trainer.train_dataset)
    model = tiny_llama().double()
    losses = []
    for row in rows:
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)[labels != -100])
        assert losses[-1].tolist() == pytest.approx(reference.cross_entropies(logits.tolist(), row["labels"]), abs=1e-12)
    assert len({len(row) for row in losses}) > 2
    w = [row["weight"] for row in rows]
    total = {"sequence": len(rows), "token": sum(map(len, losses)), "weight": sum(w)}[kind]
    loss = sum(wi * (row.sum() if kind == "token" else row.mean()) for wi, row in zip(w, losses, strict=True)) / total
    assert float(loss.detach()) == pytest.approx(reference.drift_loss([row.tolist() for row in losses], w, kind), abs=1e-12)
    loss.backward()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert apart(trainer.hfplug_gradients[0], {n: p.grad for n, p in model.named_parameters()}) <= 1e-5


@pytest.mark.parametrize("kind", ["token", "weight"])
@pytest.mark.parametrize("size", [1, 4])
def test_b35_one_denominator_per_step(kind: str, size: int) -> None:
    """The contract has it for "sequence"."""
    whole, parts = gradients(kind=kind), gradients(
        kind=kind, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
    )  # fmt: skip
    assert apart(parts, whole) <= 1e-6


def test_the_last_short_step_has_its_own_denominator() -> None:
    """Six rows in steps of four micro-batches of one: the second step is the mean of the two that are left."""
    trainer = KIT.train(
        {}, rows=KIT.rows(6), per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=2, learning_rate=0.0,
        shuffle_dataset=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    last = KIT.train({}, rows=KIT.rows(6)[4:], per_device_train_batch_size=2)
    assert apart(trainer.hfplug_gradients[1], last.hfplug_gradients[0]) <= 1e-6


def test_normalisations_agree_where_they_should_and_differ_where_they_should() -> None:
    ones = (1.0,)
    stock = KIT.train(stock=True).hfplug_gradients[0]
    assert apart(gradients(ones, "token"), stock) == 0.0
    assert apart(gradients(ones, "sequence"), gradients(ones, "weight")) <= 1e-6
    assert apart(gradients(ones, "sequence"), stock) > 1e-3  # rows have different lengths
    even = [{**row, "completion": "w5 w6 w7"} for row in KIT.rows()]
    same = [KIT.train({"drift_normalization": k}, rows=[{**r, "weight": 1.0} for r in even]).hfplug_gradients[0] for k in KINDS]
    assert max(apart(same[0], same[1]), apart(same[2], same[1])) <= 1e-6


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_the_gradient_is_linear_in_the_weights(kind: str) -> None:
    split = [gradients(tuple(w if i % 2 == half else 0.0 for i, w in enumerate(WEIGHTS)), kind) for half in (0, 1)]
    total = {name: split[0][name] + split[1][name] for name in split[0]}
    assert apart(total, gradients(kind=kind)) <= 1e-6


def test_self_normalised_weights_have_no_scale() -> None:
    """Also where their sum is below 1, the least that TRL divides by."""
    small = tuple(1e-3 * w for w in WEIGHTS)
    assert apart(gradients(small, "weight"), gradients(kind="weight")) <= 1e-5
    assert apart(gradients(small, "sequence"), gradients(kind="sequence")) > 0.9


def test_a_row_of_weight_0_is_no_row() -> None:
    """Row 2 has weight 0: without it the same sum, over one row fewer in the paper's mean."""
    without = [row for i, row in enumerate(KIT.rows()) if i != 2]
    for kind, factor in (("sequence", 7 / 8), ("weight", 1.0)):
        found = KIT.train({"drift_normalization": kind}, rows=without, per_device_train_batch_size=7).hfplug_gradients[0]
        assert apart({n: factor * g for n, g in found.items()}, gradients(kind=kind)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_learn_is_a_loss_of_0(kind: str) -> None:
    trainer = Weighted((0.0,)).train({"drift_normalization": kind})
    assert trainer.state.log_history[0]["loss"] == 0.0
    assert all(bool((g == 0).all()) for g in trainer.hfplug_gradients[0].values())
    rows = [{"input_ids": [1, 5, 6, 7], "labels": [-100, -100, 6, 7], "weight": 1.0}] * 4
    bare = [{"input_ids": [1, 5, 6, 7], "labels": [-100] * 4, "weight": 1.0}] * 4
    trainer = KIT.train({"drift_normalization": kind}, rows=[*rows, *bare], dataset_kwargs={"skip_prepare_dataset": True})
    assert all(bool(torch.isfinite(g).all()) for g in trainer.hfplug_gradients[0].values())
    expected = {"sequence": 0.5, "token": 1.0, "weight": 0.5}[kind]  # rows without a label count as rows, not as tokens
    only = KIT.train({"drift_normalization": "token"}, rows=rows, per_device_train_batch_size=4)
    assert apart(trainer.hfplug_gradients[0], {n: expected * g for n, g in only.hfplug_gradients[0].items()}) <= 1e-6


def test_metrics_of_the_stock_trainer_know_no_weights() -> None:
    logs = [KIT.metrics(KIT.train(rows=rows))[0] for rows in (KIT.rows(), KIT.neutral_rows())]
    assert logs[0]["entropy"] == logs[1]["entropy"]
    assert logs[0]["mean_token_accuracy"] == logs[1]["mean_token_accuracy"]
    assert logs[0]["loss"] != logs[1]["loss"]


def test_evaluation_with_weights_is_without_them() -> None:
    stock = KIT.build(stock=True).evaluate()["eval_loss"]
    assert KIT.build(eval_rows=KIT.rows(4, seed=1)).evaluate()["eval_loss"] == pytest.approx(stock, abs=1e-6)


def test_prompt_tuning_counts_the_labels_of_the_rows() -> None:
    """Virtual tokens in front of a row have no labels."""
    chosen = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    kinds = []
    for kind in KINDS:
        trainer = KIT.train({"drift_normalization": kind}, arguments={"peft_config": chosen}, per_device_train_batch_size=4,
                            gradient_accumulation_steps=2)  # fmt: skip
        whole = KIT.train({"drift_normalization": kind}, arguments={"peft_config": chosen})
        assert apart(trainer.hfplug_gradients[0], whole.hfplug_gradients[0]) <= 1e-6
        kinds.append(whole.hfplug_gradients[0])
    assert apart(kinds[0], kinds[1]) > 1e-3


# -- data ---------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] + ' ' }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rollout(prompt: Any, *turns: tuple[str, float], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"w{3 + int(prompt)} w4"}]
    for i, (answer, _) in enumerate(turns):
        messages += [{"role": "user", "content": "w9"}] if i else []
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "turn_rewards": [r for _, r in turns], "prompt_id": prompt, **more}


ROLLOUTS = [
    rollout(0, ("w10", 0.0), ("w11 w12", 1.0)),
    rollout(0, ("w12 w13 w14", 1.0)),
    rollout(1, ("w20", 0.0), ("w21", 0.0), ("w22", 0.0)),
    rollout(1, ("w23", 0.0), ("w24", 0.0)),
]


def chat(rows: list[dict[str, Any]], **options: Any) -> Any:
    return KIT.build(
        options, rows=rows, eval_rows=rows[:2], arguments={"processing_class": chat_tokenizer()}, shuffle_dataset=False
    )


def test_rollouts_are_weighed_and_only_the_last_answer_is_trained() -> None:
    trainer = chat(ROLLOUTS)
    expected = [row["weight"] for row in to_drift_dataset(ROLLOUTS)]
    assert list(trainer.train_dataset["weight"]) == pytest.approx(expected)
    first = trainer.train_dataset[0]
    assert first["input_ids"] == [3, 4, 10, 2, 9, 11, 12, 2]
    assert first["labels"] == [-100] * 5 + [11, 12, 2]  # and the token that ends the answer
    assert "weight" not in trainer.eval_dataset.column_names
    assert [i for i in trainer.eval_dataset[0]["labels"] if i != -100] == [11, 12, 2]
    assert trainer.evaluate(datasets.Dataset.from_list(ROLLOUTS))["eval_loss"] > 0
    dropped = chat(ROLLOUTS, drift_drop_zero_success=True, drift_beta=0.5, drift_gamma=0.5, drift_max_weight=1.2)
    ratio = math.exp(-0.5 / 0.5)
    assert list(dropped.train_dataset["weight"]) == pytest.approx([2 * ratio / (1 + ratio), 1.2])


def test_rollouts_as_a_table_with_gaps() -> None:
    """The authors' rows: turns by name, which a table fills up with None."""
    named = [{**r, "turn_rewards": {f"t{i + 1}": x for i, x in enumerate(r["turn_rewards"])}} for r in ROLLOUTS]
    table = datasets.Dataset.from_list(named)
    assert set(table[0]["turn_rewards"]) == {"t1", "t2", "t3"}
    assert to_drift_dataset(table) == to_drift_dataset(ROLLOUTS)


def test_a_stream_of_weighted_rows() -> None:
    """Rows in their order, as a stream cannot be told its length."""
    trainer = KIT.build({}, train_sampling_strategy="sequential", shuffle_dataset=False)
    rows = datasets.Dataset.from_list(KIT.rows()).to_iterable_dataset()
    with_stream = DRIFTTrainer(tiny_llama(), args=trainer.args, train_dataset=rows, processing_class=tiny_tokenizer())
    with_stream.train()
    trainer.train()
    assert with_stream.state.log_history[0]["loss"] == pytest.approx(trainer.state.log_history[0]["loss"], abs=1e-6)
    with pytest.raises(UnsupportedError, match="stream"):
        DRIFTTrainer(tiny_llama(), args=trainer.args, processing_class=tiny_tokenizer(),
                     train_dataset=datasets.Dataset.from_list(ROLLOUTS).to_iterable_dataset())  # fmt: skip


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("packing", True), ("padding_free", True), ("assistant_only_loss", True), ("completion_only_loss", False),
        ("loss_type", "dft"), ("use_liger_kernel", True), ("label_smoothing_factor", 0.1),
    ],
)  # fmt: skip
def test_fields_that_lose_weights(name: str, value: Any) -> None:
    settings = {"output_dir": "x", **KIT.settings()}
    with pytest.raises(UnsupportedError, match=name):
        DRIFTConfig(**settings, **{name: value})
    late = DRIFTConfig(**settings)
    setattr(late, name, value)
    with pytest.raises(UnsupportedError, match=name):
        DRIFTTrainer("no/such-model", args=late, train_dataset=datasets.Dataset.from_list(KIT.rows()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drift_beta", 0.0), ("drift_beta", math.nan), ("drift_gamma", 1.1), ("drift_gamma", -0.1),
        ("drift_repeat_penalty", -1.0), ("drift_max_weight", 0.0), ("drift_normalization", "tokens"), ("drift_beta", True),
    ],
)  # fmt: skip
def test_options_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        DRIFTConfig("x", use_cpu=True, **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {"prompt": r["prompt"], "completion": r["completion"]}, "no column 'weight'.*hfplug drift collect"),
        (lambda r: {**{k: r[k] for k in ("prompt", "completion")}, "weights": 1.0}, "did you mean 'weights'"),
        (lambda r: {"text": "w4", "weight": 1.0}, "'prompt' and 'completion'"),
        (lambda r: {"input_ids": [1, 5], "completion_mask": [0, 1], "weight": 1.0}, "'input_ids' and 'labels'"),
        (lambda r: {**r, "weight": -1.0}, "weight=-1.0 in row 0"),
        (lambda r: {**r, "weight": math.inf}, "weight=inf in row 0"),
        (lambda r: {**r, "weight": None}, "weight=None in row 0"),
    ],
)
def test_columns_that_are_missing_or_wrong(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KIT.build(rows=[change(row) for row in KIT.rows()])


def test_further_refusals() -> None:
    with pytest.raises(UnsupportedError, match="compute_loss_func"):
        KIT.build(arguments={"compute_loss_func": lambda *_, **__: 0})
    with pytest.raises(UnsupportedError, match="'image'"):
        KIT.build(rows=[{**row, "image": "x"} for row in KIT.rows()])
    trainer = KIT.build()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    lacking = {k: v for k, v in batch.items() if k != "weight"}
    with pytest.raises(ConfigError, match="no 'weight'"):
        trainer.compute_loss(trainer.model.train(), lacking)
    with pytest.raises(ConfigError, match="no 'weight'"):
        trainer.get_batch_samples(iter([lacking]), 1, trainer.args.device)
    with pytest.raises(UnsupportedError, match="8 rows has 3 weights"):
        trainer.compute_loss(trainer.model, {**lacking, "weight": torch.ones(3)})
    with pytest.raises(ConfigError, match="one per row"):
        WeightCollator(lambda rows: {})([{"weight": 1.0}, {}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_by_itself_is_its_own_step(kind: str) -> None:
    """``compute_loss`` called without a denominator; unknown arguments are passed on (check B36)."""
    trainer = KIT.build({"drift_normalization": kind})
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    held = dict(batch)
    alone = trainer.compute_loss(trainer.model.train(), batch)
    assert batch.keys() == held.keys()
    trainer.train()
    assert float(alone.detach()) == pytest.approx(trainer.state.log_history[0]["loss"], abs=1e-6)
    with pytest.raises(TypeError, match="of_a_later_release"):
        trainer.compute_loss(trainer.model, held, of_a_later_release=1)


@pytest.mark.parametrize("kind", ["sequence", "weight"])
def test_a_model_that_takes_no_loss_arguments_is_not_scaled_twice(kind: str) -> None:
    """The denominator spans the window, whatever training_step thinks of the model."""
    found = []
    for accepts in (True, False):
        settings = {"drift_normalization": kind, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
        trainer = KIT.build({**settings, "learning_rate": 0.1, "optim": "sgd"})
        trainer.model_accepts_loss_kwargs = accepts
        trainer.train()
        found.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_token_that_is_certain_counts_in_the_length_of_its_row() -> None:
    """Its log-probability is 0, as where there is no label."""
    made = SimpleNamespace(log_probs=torch.tensor([[0.0, -1.0, -2.0, 0.0]]), label_mask=torch.tensor([[1, 1, 1, 0]]))
    weighted = _Weighted(lambda **_: made, torch.tensor([3.0]), per_token=False)
    assert weighted(fused_lm_head=True).log_probs.tolist() == [[0.0, -1.0, -2.0, 0.0]]


def test_the_own_options_stand_beside_those_of_trl() -> None:
    names = {f.name for f in dataclasses.fields(DRIFTConfig)} - set(DRIFTConfig.hidden_options)
    assert names
    assert all(name.startswith("drift_") for name in names)
