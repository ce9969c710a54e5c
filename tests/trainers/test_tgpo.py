"""TGPO: the contract of a trainer, the limits of the card against TRL's own GRPO, and the properties the gate is there for."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from trainer_kit import TrainerContract

from hfplug import training
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.seams.trainer import stock_trainer
from hfplug.testing import models, trainer_kits
from hfplug.trainers import TGPOConfig, TGPOTrainer
from hfplug.trainers.grpo_base import Rollout
from hfplug.trainers.tgpo.trainer import information, sequence_weight, trust_gate

NEUTRAL: dict[str, Any] = {
    "tgpo_gate": "off", "tgpo_kappa": None, "tgpo_surrogate": "clip", "epsilon_high": None, "num_iterations": 2,
}  # fmt: skip
B, T = 6, 7


class TestTGPO(TrainerContract):
    method = "tgpo"
    neutral: ClassVar[dict[str, Any]] = NEUTRAL
    options: ClassVar[dict[str, Any]] = {"tgpo_tau": 0.02, "tgpo_kappa": 0.01}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "learning_rate": 0.1}  # far enough for ratios off 1


# -- on given log-probabilities -----------------------------------------------------------------------------------------


class Given:
    """A trainer without a model: its loss on log-probabilities that are given."""

    def __init__(self, loss_type="dapo", beta=0.0, **options):
        settings = {**trainer_kits.settings("grpo"), "loss_type": loss_type, "epsilon_high": 0.28, "beta": beta, **options}
        self.config = TGPOConfig(output_dir="unused", **settings)

    def trainer(self):
        import accelerate

        config = self.config
        made = object.__new__(TGPOTrainer)
        for name in ("loss_type", "beta", "top_entropy_quantile", "off_policy_mask_threshold", "max_completion_length"):
            setattr(made, name, getattr(config, name))
        made.args, made.epsilon_low, made.epsilon_high = config, config.epsilon, config.epsilon_high
        made.importance_sampling_level, made.accelerator = "token", accelerate.Accelerator(cpu=True)
        made.aux_loss_enabled = made._entropy_bonus_enabled = made.use_vllm = made.use_adaptive_entropy = False
        made.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        made.model, made.state = torch.nn.Linear(1, 1), SimpleNamespace()
        made._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        return made

    def loss(self, inputs, logps, function=TGPOTrainer._compute_loss, level="token"):
        """Loss and gradient with respect to ``logps``."""
        made = self.trainer()
        made.importance_sampling_level = level
        logps = logps.clone().requires_grad_()
        made._get_per_token_logps_and_entropies = lambda *a, **k: (logps, inputs["entropies"], None)
        found = function(made, None, dict(inputs))
        (gradient,) = torch.autograd.grad(found, logps)
        self.made = made
        return found.detach(), gradient


def draw(seed=0, drift=0.4, wide=False, tool=False, dtype=torch.float32):
    """A ragged batch with a row that is masked whole, and log-probabilities off the old ones by ``drift``."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    old = -2 + 0.5 * noise(B, T)
    inputs = {
        "prompt_ids": torch.ones(B, 2, dtype=torch.long), "prompt_mask": torch.ones(B, 2, dtype=torch.long),
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": (torch.arange(T) < torch.tensor([7, 4, 1, 0, 5, 2])[:, None]).long(),
        "advantages": noise(B, T) if wide else noise(B), "num_items_in_batch": torch.tensor(19), "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.1 * noise(B, T), "entropies": noise(B, T).abs(),
        "importance_sampling_ratio": noise(B, 1).exp(),
    }  # fmt: skip
    if tool:
        inputs["tool_mask"] = (torch.rand(B, T, generator=generator) > 0.3).long()
    return inputs, old + drift * noise(B, T)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_limits_are_trls_token_and_sequence_level(loss_type, beta):
    """Gate 1 (or no anchor) is GRPO, gate 0 is the sequence level: value and gradient, ragged, with (B, T) advantages."""
    stock = stock_trainer("grpo")._compute_loss
    same = {"tgpo_kappa": None, "tgpo_surrogate": "clip"}
    for seed in range(3):
        inputs, logps = draw(seed, wide=seed == 1, tool=seed == 2)
        for options, level in (
            ({"tgpo_gate": "const:1"}, "token"), ({"tgpo_gate": "off"}, "token"), ({"tgpo_anchor": "token"}, "token"),
            ({"tgpo_gate": "const:0"}, "sequence"),
        ):  # fmt: skip
            # The KL of TGPO is corrected by the token's ratio; TRL at sequence level takes the sequence's.
            kl = {"use_bias_correction_kl": level == "token"}
            given = Given(loss_type, beta, **same, **kl, **options)
            ours, gradient = given.loss(inputs, logps)
            theirs, expected = given.loss(inputs, logps, stock, level)
            assert float((ours - theirs).abs()) <= 1e-6
            assert float((gradient - expected).abs().max()) <= 1e-6
            assert float(expected.abs().max()) > 1e-3


def test_on_policy_every_setting_has_the_gradient_of_grpo():
    inputs, logps = draw(drift=0.0)
    inputs["old_per_token_logps"] = logps
    _, expected = Given().loss(inputs, logps, stock_trainer("grpo")._compute_loss)
    for surrogate in ("clip", "retain"):
        for gate in ("gaussian", "const:0.3", "off"):
            _, found = Given(tgpo_surrogate=surrogate, tgpo_gate=gate).loss(inputs, logps)
            if gate == "gaussian" or surrogate == "retain":
                assert float((found - expected).abs().max()) <= 1e-6, (surrogate, gate)
            elif gate == "const:0.3":  # a constant gate shares the gradient within a sequence, and keeps its sum
                assert float((found.sum(1) - expected.sum(1)).abs().max()) <= 1e-6


def rollout(log_ratio, mask=None, **changes):
    mask = torch.ones_like(log_ratio) if mask is None else mask
    values = {"entropies": torch.ones_like(log_ratio), "advantages": torch.ones(len(log_ratio), 1), "logps": log_ratio, **changes}
    return Rollout(inputs={}, log_ratio=log_ratio, mask=mask, **values)


@pytest.mark.parametrize("tau", [0.05, 0.2, 1.0])
def test_no_token_is_further_from_its_sequence_than_the_bound(tau):
    trainer = Given(tgpo_tau=tau).trainer()
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        ratio = torch.randn(4, 9, generator=generator) * 10 ** float(torch.rand(1, generator=generator) * 3 - 1.5)
        found = trainer.log_weights(rollout(ratio)) - ratio.mean(1, keepdim=True)
        assert float(found.abs().max()) <= tau * math.exp(-0.5) + 1e-6 * float(ratio.abs().max().clamp(min=1))
    residual = torch.linspace(0, 5, 100)
    gate = trust_gate(residual, tau)
    assert (gate.diff() <= 0).all()
    assert torch.equal(gate, trust_gate(-residual, tau))
    assert gate[0] == 1


def test_variance_of_gated_residuals():
    """Unit-variance normal residuals, tau .5: 1 becomes (1 + 2/tau²)^(-3/2) = 1/27."""
    residual = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    assert float((trust_gate(residual, 0.5) * residual).var()) == pytest.approx(1 / 27, rel=0.01)


def test_retain_keeps_every_gradient_and_clip_does_not():
    inputs, logps = draw()
    logps = inputs["old_per_token_logps"] + torch.tensor([3.0, 0.0, -3.0, 0.1, 1.0, -0.1, 2.0])
    counted = inputs["completion_mask"].bool()
    _, kept = Given(tgpo_surrogate="retain").loss(inputs, logps)
    _, clipped = Given(tgpo_surrogate="clip", tgpo_gate="off").loss(inputs, logps)
    assert (kept[counted] != 0).all()
    assert (clipped[counted] == 0).any()
    assert (kept[~counted] == 0).all()


def test_the_weight_of_a_sequence():
    drift = torch.linspace(-3, 3, 61)
    weight = sequence_weight(drift, 0.3, 0.2)
    assert ((weight >= 0.2) & (weight <= 1)).all()
    assert weight[30] == 1
    assert (weight[30:].diff() <= 0).all()
    assert (sequence_weight(drift, None, 0.2) == 1).all()
    inputs, logps = draw(wide=True)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    mixed = {k: v[order] if v.dim() else v for k, v in inputs.items()}
    loss, gradient = Given().loss(inputs, logps)
    again, permuted = Given().loss(mixed, logps[order])
    assert float((loss - again).abs()) <= 1e-6
    assert float((gradient[order] - permuted).abs().max()) <= 1e-6


@pytest.mark.parametrize("surrogate", ["clip", "retain"])
@pytest.mark.parametrize("quantile", [None, 0.6])
def test_against_the_equations_with_gate_and_weight_held(surrogate, quantile):
    """Written out row by row in float64, gate and weight as constants: loss and gradient."""
    inputs, logps = draw(dtype=torch.float64)
    tau, kappa, least = 0.3, 0.2, 0.25
    options = {"tgpo_tau": tau, "tgpo_kappa": kappa, "tgpo_w_min": least, "tgpo_info_quantile": quantile}
    ours, gradient = Given("grpo", tgpo_surrogate=surrogate, **options).loss(inputs, logps)

    p = logps.clone().requires_grad_()
    known = inputs["entropies"][inputs["completion_mask"].bool()].float()
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
        if not length:
            continue
        d = [p[i, t] - inputs["old_per_token_logps"][i, t] for t in range(length)]
        s = sum(d) / length
        w = least + (1 - least) * math.exp(-(float(s) ** 2) / (2 * kappa**2))
        for t in range(length):
            e = d[t] - s
            k = math.exp(-(float(e) ** 2) / (2 * tau**2))
            if quantile is not None:
                k *= min(1.0, float(inputs["entropies"][i, t]) / float(known.quantile(quantile)))
            rho, a = torch.exp(s + k * e), inputs["advantages"][i]
            near = rho.clamp(0.8, 1.28)
            term = torch.min(rho * a, near * a) if surrogate == "clip" else near.detach() * a * p[i, t]
            total = total - w * term / length / B
    (expected,) = torch.autograd.grad(total, p)
    assert float((ours - total).abs()) <= 1e-6
    assert float((gradient - expected).abs().max()) <= 1e-6


def test_padding_and_its_garbage_change_nothing():
    inputs, logps = draw()
    loss, gradient = Given(tgpo_info_quantile=0.5).loss(inputs, logps)
    padded = {
        k: torch.nn.functional.pad(v, (0, 4), value=0) if v.dim() == 2 and v.shape[1] == T else v for k, v in inputs.items()
    }
    padded["old_per_token_logps"][:, T:] = -300.0
    wide, at = Given(tgpo_info_quantile=0.5).loss(padded, torch.nn.functional.pad(logps, (0, 4), value=50.0))
    assert float((loss - wide).abs()) <= 1e-6
    assert float((gradient - at[:, :T]).abs().max()) <= 1e-6
    assert (at[:, T:] == 0).all()


def test_one_wild_token_is_bounded_where_grpo_follows_it():
    """d = 5 at one token, A < 0 (no upper clip): GRPO's gradient there is e^5, TGPO's stays at the sequence's scale."""
    inputs, _ = draw()
    inputs["completion_mask"] = torch.ones(B, T, dtype=torch.long)
    inputs["advantages"] = torch.full((B,), -1.0)
    logps = inputs["old_per_token_logps"].clone()
    logps[0, 0] += 5.0
    stock = stock_trainer("grpo")._compute_loss
    options = {"tgpo_surrogate": "clip", "tgpo_kappa": None}
    _, theirs = Given("grpo", **options).loss(inputs, logps, stock)
    _, ours = Given("grpo", **options).loss(inputs, logps)
    assert float(theirs[0, 0]) == pytest.approx(math.exp(5) / T / B, rel=1e-5)
    # l_0 = s as its gate is e^(-e²/2τ²) = 0, l_t = s otherwise (e = -s, gate = exp(-s²/2τ²)); d l_0 / d p_0 = 1 / T
    s = 5 / T
    gate = math.exp(-(s**2) / (2 * 0.2**2))
    expected = (math.exp(s) + (T - 1) * math.exp(s - gate * s) * (1 - gate)) / T / T / B
    assert float(ours[0, 0]) == pytest.approx(expected, rel=1e-4)
    assert float(ours.norm()) < 0.1 * float(theirs.norm())


def test_the_kl_is_corrected_by_the_ratio_of_the_token():
    """Not by the gated weight: what the correction is for is the sampling."""
    made = Given(tgpo_tau=0.1).trainer()
    given = rollout(torch.tensor([[0.5, -0.3, 0.1]]))
    weights = made.log_weights(given)
    assert not torch.allclose(weights, given.log_ratio, atol=1e-2)
    assert torch.equal(made.kl_ratio(given, weights), given.log_ratio.exp())


def test_infinite_ratios_at_padding_change_nothing():
    """A token that is masked by nobody's fault but its own: 0 times infinity is not 0."""
    made, mask = Given(tgpo_info_quantile=0.5).trainer(), torch.tensor([[1, 1, 0]])
    clean = made.log_weights(rollout(torch.tensor([[0.2, -0.1, 0.0]]), mask))
    for garbage in (torch.inf, -torch.inf, torch.nan):
        assert torch.equal(made.log_weights(rollout(torch.tensor([[0.2, -0.1, garbage]]), mask)), clean)


def test_vllm_ratio_and_metrics():
    inputs, logps = draw()
    given = Given()
    plain = given.loss(inputs, logps)[0]
    pending = vars(given.made.state)["_hfplug_metrics"].drain("train")
    assert 0 < pending["tgpo/trust"] < 1
    assert 0.2 <= pending["tgpo/weight"] <= 1

    class Vllm(Given):
        def trainer(self):
            made = super().trainer()
            made.use_vllm = made.vllm_importance_sampling_correction = True
            return made

    ones = {**inputs, "importance_sampling_ratio": torch.full((B, 1), 2.0)}
    assert float(Vllm().loss(ones, logps)[0]) == pytest.approx(2 * float(plain), rel=1e-6)


def test_information_carries_no_gradient():
    entropies = torch.rand(2, 5, requires_grad=True)
    assert not information(entropies, torch.ones(2, 5, dtype=torch.bool), 0.5).requires_grad


def test_information_factor():
    entropies, counted = torch.tensor([[1.0, 2.0, 4.0, 100.0]]), torch.tensor([[True, True, True, False]])
    assert information(entropies, counted, 0.5).tolist() == [[0.5, 1.0, 1.0, 1.0]]
    assert (information(torch.zeros(1, 4), counted, 0.5) == 1).all()
    assert (information(entropies, ~counted & False, 0.5) == 1).all()


# -- the config and its errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tgpo_tau": 0.0}, ConfigError, ["tgpo_tau=0.0", "> 0"]),
        ({"tgpo_tau": float("nan")}, ConfigError, ["tgpo_tau=nan"]),
        ({"tgpo_kappa": -1.0}, ConfigError, ["tgpo_kappa=-1.0"]),
        ({"tgpo_w_min": 1.5}, ConfigError, ["tgpo_w_min=1.5", "<= 1"]),
        ({"tgpo_info_quantile": 0.0}, ConfigError, ["tgpo_info_quantile"]),
        ({"tgpo_gate": "gausian"}, ConfigError, ["'gausian'", "'gaussian'"]),
        ({"tgpo_gate": "const:2"}, ConfigError, ["const:2", "[0, 1]"]),
        ({"tgpo_gate": "const:x"}, ConfigError, ["const:x"]),
        ({"tgpo_anchor": "tokens"}, ConfigError, ["tgpo_anchor='tokens'", "did you mean 'token'"]),
        ({"loss_type": "cispo"}, UnsupportedError, ["loss_type='cispo'", "dapo"]),
        ({"loss_type": "luspo"}, UnsupportedError, ["loss_type='luspo'"]),
        ({"importance_sampling_level": "sequence"}, UnsupportedError, ["importance_sampling_level='sequence'", "tgpo_anchor"]),
        ({"delta": 2.0}, UnsupportedError, ["delta=2.0", "retain"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(options, error, words):
    with pytest.raises(error) as caught:
        TGPOConfig(output_dir="x", **{**trainer_kits.settings("grpo"), **options})
    for word in words:
        assert word in str(caught.value)


def test_on_policy_is_warned_of():
    def build(**options):
        contract = TestTGPO()
        return contract.build({}, **options)

    with pytest.warns(UserWarning, match="num_iterations=1.*on-policy"):
        build(num_iterations=1)
    import warnings

    for options in ({"num_iterations": 2}, {"num_iterations": 1, "steps_per_generation": 2}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="tgpo")
            build(**options)


RUN: dict[str, Any] = {
    "model_name_or_path": "nowhere/at-all", "datasets": [{"path": "json", "data_files": "nowhere.jsonl"}],
    "reward_funcs": ["think_format_reward"], "output_dir": "unused", "bf16": False, "report_to": "none", "use_cpu": True,
    "plugins": {"trainer": {"type": "tgpo", "tgpo_tau": 0.1}},
}  # fmt: skip


def test_a_run_file_reaches_it():
    run = training.parse(RUN, "grpo")
    assert type(run.arguments["training"]) is TGPOConfig
    assert run.arguments["training"].tgpo_tau == 0.1
    for changes, task, words in (
        ({}, "sft", ["tgpo", "hfplug train grpo"]),
        ({"tgpo_tau": 0.1}, "grpo", ["'tgpo_tau'", "plugins.trainer"]),
        ({"plugins": {"trainer": {"type": "tgpo", "tgpo_tao": 0.1}}}, "grpo", ["'tgpo_tao'", "'tgpo_tau'"]),
        ({"plugins": {"trainer": {"type": "tgpo", "learning_rate": 0.1}}}, "grpo", ["'learning_rate'", "of its own"]),
        ({"reward_funcs": ["think_format_rewrd"]}, "grpo", ["'think_format_rewrd'", "'think_format_reward'"]),
        ({"reward_funcs": ["nowhere.at_all"]}, "grpo", ["nowhere.at_all"]),
        ({"reward_funcs": []}, "grpo", ["reward_funcs"]),
    ):
        with pytest.raises(ConfigError) as caught:
            training.parse({k: v for k, v in {**RUN, **changes}.items() if task == "grpo" or k != "reward_funcs"}, task)
        for word in words:
            assert word in str(caught.value)


def test_a_run_file_trains(tmp_path):
    """``hfplug train grpo`` with the method and a tuner, on files."""
    import json

    models.tiny_llama().save_pretrained(tmp_path / "model")
    models.tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trainer_kits.rows("grpo")))
    settings = {k: v for k, v in trainer_kits.settings("grpo").items() if k != "report_to"}
    run = {
        **RUN, **settings, "model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "run"),
        "datasets": [{"path": "json", "data_files": str(tmp_path / "rows.jsonl")}], "dtype": "float32",
        "reward_funcs": ["hfplug.testing.trainer_kits.reward_of"],
        "plugins": {**RUN["plugins"], "tuner": {"type": "ulora", "r": 2, "target_modules": ["q_proj"]}},
    }  # fmt: skip
    result = training.train(run, "grpo")
    assert type(result.trainer) is TGPOTrainer
    assert 0 < result.metrics["tgpo/trust"] <= 1
    assert (tmp_path / "run" / "adapter_config.json").is_file()
