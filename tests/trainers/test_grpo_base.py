"""The GRPO loss in parts equals TRL's own, value, gradient and metrics, on the same inputs; each part is really used."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from datasets import Dataset

from hfplug.errors import ConfigError
from hfplug.seams.trainer import stock_config, stock_trainer
from hfplug.testing import models, trainer_kits
from hfplug.trainers.grpo_base import GRPOBaseTrainer

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
B, P, T = 5, 3, 6
Stock = stock_trainer("grpo")


def moe():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {k: v for k, v in models._SHARED.items() if k != "hidden_size"}
    torch.manual_seed(0)
    sizes |= {"hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True)).float()


def build(tmp, model=None, cls=GRPOBaseTrainer, **settings):
    """A trainer whose loss is called, not trained."""
    config = stock_config("grpo")(output_dir=str(tmp), **{**trainer_kits.settings("grpo"), **settings})
    trainer = cls(
        model=model or models.tiny_llama(), args=config, train_dataset=Dataset.from_list(trainer_kits.rows("grpo")),
        processing_class=models.tiny_tokenizer(), reward_funcs=trainer_kits.reward_of,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # which train() sets
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("grpo"))


def batch(seed=0, *, old=True, wide=False, drift=0.3, tool=False):
    """Rows of uneven length, one of them masked whole."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=draw)

    lengths = torch.tensor([6, 3, 1, 0, 4])
    mask = (torch.arange(T) < lengths[:, None]).long()
    found = {
        "prompt_ids": torch.randint(3, 60, (B, P), generator=draw),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.randint(3, 60, (B, T), generator=draw),
        "completion_mask": mask,
        "advantages": noise(B, T) if wide else noise(B),
        "num_items_in_batch": torch.tensor(37),
        "ref_per_token_logps": -4.1 + 0.2 * noise(B, T),
        "importance_sampling_ratio": noise(B, T).exp(),
    }
    if old:
        found["old_per_token_logps"] = -4.1 + drift * noise(B, T)
    if tool:
        found["tool_mask"] = (torch.rand(B, T, generator=draw) > 0.3).long()
    return found


def outcome(trainer, inputs, function):
    """Loss, gradients and metrics of one of the two functions."""
    state = {name: getattr(trainer, name) for name in ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")}
    trainer.model.zero_grad()
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    loss = function(trainer, trainer.model, dict(inputs))
    loss.backward()
    after = {name: getattr(trainer, name) for name in state}
    vars(trainer).update(state)
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, {mode: dict(values) for mode, values in trainer._metrics.items()}, after


def assert_same(trainer, inputs):
    """TRL's function and ours on one trainer: bit for bit, metrics and the entropy controller included."""
    ours = outcome(trainer, inputs, GRPOBaseTrainer._compute_loss)
    theirs = outcome(trainer, inputs, Stock._compute_loss)
    assert torch.isfinite(theirs[0])
    assert abs(float(ours[0] - theirs[0])) <= 1e-6
    assert ours[1].keys() == theirs[1].keys()
    assert max(float(g.abs().max()) for g in theirs[1].values()) > 1e-5  # there is something to compare
    assert all(float((ours[1][n] - g).abs().max()) <= 1e-6 for n, g in theirs[1].items())
    for mode, values in theirs[2].items():
        assert ours[2][mode].keys() == values.keys()
        for name, value in values.items():
            assert ours[2][mode][name] == pytest.approx(value, abs=1e-6, nan_ok=True), name
    assert str(ours[3]) == str(theirs[3])


@pytest.fixture
def setting(trainer, monkeypatch):
    """Set attributes of the trainer, or of its config, for one test."""

    def change(patch=monkeypatch, **values):
        for name, value in values.items():
            owners = [owner for owner in (trainer, trainer.args) if hasattr(owner, name)]
            assert owners, name
            for owner in owners:
                patch.setattr(owner, name, value)
        return trainer

    trainer.model.train()
    change(current_gradient_accumulation_steps=1)
    return change


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_and_level(setting, loss_type, level):
    """With and without KL, on and off policy, and for pairs of steps per generation and accumulation."""
    for beta, old, (per_generation, accumulation) in itertools.product((0.0, 0.04), (True, False), ((1, 1), (4, 2), (2, 4))):
        if not old and (per_generation, accumulation) != (2, 4):
            continue  # TRL gives the old log-probabilities whenever a batch outlives its accumulation window
        trainer = setting(
            loss_type=loss_type, importance_sampling_level=level, beta=beta, steps_per_generation=per_generation,
            current_gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        assert_same(trainer, batch(old=old))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_whole_grid(setting, loss_type, level):
    """The same with every further switch, three draws of data, training and evaluation."""
    switches = (
        {}, {"delta": 1.5}, {"use_bias_correction_kl": False}, {"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.1},
        {"use_vllm": True, "vllm_importance_sampling_correction": True}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
    )  # fmt: skip
    for seed, beta, wide, tool, mode in itertools.product(range(3), (0.0, 0.04), (False, True), (False, True), (True, False)):
        for switch in switches:
            with pytest.MonkeyPatch.context() as patch:
                trainer = setting(patch, loss_type=loss_type, importance_sampling_level=level, beta=beta, **switch)
                trainer.model.train(mode)
                assert_same(trainer, batch(seed, wide=wide, tool=tool))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "vespo"])
@pytest.mark.parametrize(
    "switch",
    [
        {"delta": 1.2}, {"use_bias_correction_kl": False}, {"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.1},
        {"use_vllm": True, "vllm_importance_sampling_correction": True}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
        {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True, "entropy_target": 9.0, "_last_world_entropy": 0.5,
         "entropy_coef_delta": 0.01, "entropy_coef_max": 1.0},
    ],
    ids=lambda s: next(reversed(s)),
)  # fmt: skip
def test_every_switch(setting, loss_type, switch):
    trainer = setting(loss_type=loss_type, beta=0.04, **switch)
    assert_same(trainer, batch(wide=True, tool=True))
    trainer.model.eval()
    assert_same(trainer, batch(wide=False))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_moe_auxiliary_loss(tmp_path, loss_type):
    trainer = build(tmp_path, model=moe(), loss_type=loss_type, router_aux_loss_coef=0.05)
    assert trainer.aux_loss_enabled
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    assert_same(trainer, batch())
    assert trainer._metrics["train"]["aux_loss"]
    full = outcome(trainer, batch(), GRPOBaseTrainer._compute_loss)[0]
    trainer.router_aux_loss_coef = 0.0
    assert not torch.equal(full, outcome(trainer, batch(), GRPOBaseTrainer._compute_loss)[0])


def test_what_vision_models_need_reaches_the_forward(setting, monkeypatch):
    """Both functions call the forward with the same arguments, whatever a processor put in the batch."""
    trainer, keys = setting(), (
        "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
        "token_type_ids", "mm_token_type_ids", "image_position_ids",
    )  # fmt: skip
    calls = []

    def forward(model, *args, **kwargs):
        calls.append((args, kwargs))
        logps = torch.full((B, T), -4.0) + model.lm_head.weight.sum() * 0.01
        return logps, torch.ones(B, T), None

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", forward)
    inputs = {**batch(), **{key: object() for key in keys}}
    for function in (GRPOBaseTrainer._compute_loss, Stock._compute_loss):
        function(trainer, trainer.model, inputs)
    (args, ours), (theirs_args, theirs) = calls
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(args, theirs_args, strict=True))
    assert ours == theirs
    assert {key: ours[key] for key in keys} == {key: inputs[key] for key in keys}


@pytest.mark.parametrize("name", ["log_weights", "token_loss", "extra_loss", "kl_ratio"])
def test_each_part_is_used(setting, name):
    """A subclass that changes one part changes the gradient; accumulation divides what it adds."""
    trainer = setting(loss_type="grpo", beta=0.04)
    before = outcome(trainer, batch(), GRPOBaseTrainer._compute_loss)

    class Changed(GRPOBaseTrainer):
        def log_weights(self, rollout):
            return super().log_weights(rollout) * (0.5 if name == "log_weights" else 1)

        def token_loss(self, rollout, log_weights):
            loss, shown = super().token_loss(rollout, log_weights)
            return (2 * loss, {"twice": loss}) if name == "token_loss" else (loss, shown)

        def extra_loss(self, rollout):
            return (rollout.logps * rollout.mask).mean() if name == "extra_loss" else None

        def kl_ratio(self, rollout, log_weights):
            return super().kl_ratio(rollout, log_weights) * (3 if name == "kl_ratio" else 1)

    trainer.__class__ = Changed
    try:
        after = outcome(trainer, batch(), Changed._compute_loss)
        setting(current_gradient_accumulation_steps=2)
        half = outcome(trainer, batch(), Changed._compute_loss)
    finally:
        trainer.__class__ = GRPOBaseTrainer
    assert max(float((after[1][n] - g).abs().max()) for n, g in before[1].items()) > 1e-4
    assert ("twice" in after[2]["train"]) == (name == "token_loss")
    assert float(half[0]) == pytest.approx(float(after[0]) / 2, abs=1e-6)


def test_unknown_names_are_refused(setting):
    trainer = setting(importance_sampling_level="word")
    with pytest.raises(ConfigError, match="importance_sampling_level='word'"):
        trainer._compute_loss(trainer.model, batch())
    trainer = setting(importance_sampling_level="token", loss_type="ppo")
    with pytest.raises(ConfigError, match="loss_type='ppo'"):
        trainer._compute_loss(trainer.model, batch())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_evaluation_is_not_divided_by_the_accumulation(trainer, setting, loss_type):
    """TRL's loss in evaluation, which knows no window."""
    setting(loss_type=loss_type, current_gradient_accumulation_steps=4)
    trainer.model.eval()
    try:
        assert_same(trainer, batch())
    finally:
        trainer.model.train()
