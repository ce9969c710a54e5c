"""SA-DPO: its surrogates and margins in closed form, the trainer against TRL's, and what its card asks for."""

from __future__ import annotations

import datasets
import peft
import pytest
import torch
import trl
from sadpo_kit import SETTINGS, batch, dpo, loss_of, parameters, policy_and_reference, preferences, rewards_of
from torch.nn.functional import logsigmoid
from trainer_kit import TrainerContract

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers import (
    SADPOConfig,
    SADPOTrainer,
    add_margin,
    margin_capacity_profile,
    structure_margin,
    surrogate,
)
from hfplug.trainers.sa_dpo.config import STOCK_LOSSES
from hfplug.trainers.sa_dpo.surrogates import pair_losses
from hfplug.trainers.sa_dpo.trainer import PairValues

U = torch.linspace(-4, 4, 81, dtype=torch.float64) + 0.013  # no point on the kink at 1
NEUTRAL = {"surrogate": "logistic", "margin": "constant", "gamma_max": 0.0}


def off(found, expected):
    return float((found - expected).abs().max())


class TestSADPO(TrainerContract):
    method = "sa_dpo"
    neutral = {"sa_dpo_margin": "constant", "sa_dpo_gamma_max": 0.0}  # noqa: RUF012
    options = {"sa_dpo_surrogate": "poly", "sa_dpo_gamma_max": 0.8}  # noqa: RUF012

    def rows(self, count=8, seed=0):
        """With distances on both sides of tau."""
        return preferences(count, seed).to_list()


# -- surrogates ---------------------------------------------------------------------------------------------------------

CLOSED = {
    "logistic": ({}, lambda u: torch.log1p(torch.exp(-u))),
    "hinge": ({}, lambda u: torch.where(u < 1, 1 - u, 0 * u)),
    "poly": ({"power": 2.5}, lambda u: torch.where(u < 1, (1 - u).clamp(min=0) ** 2.5, 0 * u)),
    "exp": ({}, lambda u: torch.e**-u),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_surrogate_is_its_formula_with_its_gradient_and_never_rises(name):
    options, closed = CLOSED[name]
    phi = surrogate(name, **options)
    assert off(phi(U), closed(U)) < 1e-12
    assert (phi(U).diff() <= 0).all()
    assert phi(U)[0] > phi(U)[-1]
    assert torch.autograd.gradcheck(phi, U.clone().requires_grad_())


def test_poly_at_power_1_is_the_hinge_and_at_power_2_smooth_at_its_kink():
    u = torch.tensor([-3.0, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    slopes = {}
    for name, options in (("hinge", {}), ("one", {"power": 1.0}), ("two", {"power": 2.0})):
        phi = surrogate("hinge") if name == "hinge" else surrogate("poly", **options)
        (slopes[name],) = torch.autograd.grad(phi(u).sum(), u)
    assert surrogate("poly", power=1.0)(u).equal(surrogate("hinge")(u))
    assert slopes["one"].equal(slopes["hinge"])
    assert slopes["one"][3] == 0
    assert slopes["two"].tolist() == [-8, -1, 0, 0]
    assert torch.autograd.gradcheck(surrogate("poly"), torch.ones(3, dtype=torch.float64, requires_grad=True), atol=1e-5)


def test_the_margin_is_0_for_synonyms_grows_with_distance_and_is_full_from_tau_on():
    d = torch.linspace(0, 1, 41, dtype=torch.float64)
    gamma = structure_margin(d, 0.5, 0.25)
    assert gamma[0] == 0
    assert (gamma.diff() >= 0).all()
    assert (gamma[d >= 0.25] == 0.5).all()
    assert (gamma[d < 0.25] < 0.5).all()
    assert structure_margin(0.1, 0.5, 0.25) == pytest.approx(0.2)
    rewards = torch.linspace(-3, 3, 41, dtype=torch.float64)
    for name in CLOSED:
        phi = surrogate(name)
        assert (pair_losses(phi, rewards[:, None], gamma[None]).diff(dim=1) >= 0).all()
        assert (
            pair_losses(phi, rewards[:, None], structure_margin(d, 0.9, 0.25)[None])
            >= pair_losses(phi, rewards[:, None], gamma[None])
        ).all()
        assert pair_losses(phi, rewards, gamma[0]).equal(phi(rewards))


def test_the_profile_is_0_for_poly_from_capacity_margin_plus_1_on_and_never_for_the_logistic():
    margins = [0.0, 0.5, 1.0, 2.0]
    for capacity in (0.0, 0.9, 1.0, 1.5, 3.0):
        poly, hinge = (margin_capacity_profile(surrogate(n), capacity, margins) for n in ("poly", "hinge"))
        assert [p == 0 for p in poly] == [h == 0 for h in hinge] == [capacity - g >= 1 for g in margins]
        for name in ("logistic", "exp"):
            found = margin_capacity_profile(surrogate(name), capacity, margins)
            assert min(found) > 0
            assert found == sorted(found)
        assert margin_capacity_profile(surrogate("poly"), capacity, [0.5])[0] == max(0.0, 1.5 - capacity) ** 2
    with pytest.raises(ConfigError, match="capacity=-1"):
        margin_capacity_profile(surrogate("poly"), -1, [0.0])


@pytest.mark.parametrize(("name", "slope"), [("logistic", lambda g: 1 / (1 + torch.e**-g)), ("poly", lambda g: 2 * (1 + g))])
def test_a_synonym_pair_in_both_orders_pulls_less_without_a_margin(name, slope):
    phi, d = surrogate(name), torch.zeros((), dtype=torch.float64)
    both = lambda r, g: phi(r - g) + phi(-r - g)  # noqa: E731
    rewards = torch.linspace(-2, 2, 41, dtype=torch.float64)
    noise = {}
    for kind, gamma in (("constant", torch.full_like(d, 0.5)), ("structure", structure_margin(d, 0.5, 0.25))):
        assert both(rewards, gamma).argmin() == 20  # at Delta = 0, with any margin
        r = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (noise[kind],) = torch.autograd.grad(phi(r - gamma), r)
        assert -noise[kind].item() == pytest.approx(slope(gamma.item()), rel=1e-12)
    assert noise["structure"].abs() < noise["constant"].abs()


def test_label_smoothing_mixes_the_pair_the_other_way_round_with_the_same_margin():
    rewards, gamma, phi = U, torch.full_like(U, 0.3), surrogate("poly")
    found = pair_losses(phi, rewards, gamma, 0.1)
    assert off(found, 0.9 * phi(U - 0.3) + 0.1 * phi(-U - 0.3)) < 1e-12
    assert pair_losses(phi, rewards, gamma, 0.0).equal(phi(U - 0.3))


def test_what_cannot_be_called_is_no_surrogate(monkeypatch):
    import hfplug.trainers.sa_dpo.surrogates as module

    monkeypatch.setattr(module, "build_extension", lambda *_: object())
    with pytest.raises(ConfigError, match="surrogate='odd': object is not callable"):
        surrogate("odd")


# -- the trainer at its neutral setting: TRL's --------------------------------------------------------------------------

SAME = {
    "plain": ({}, {}),
    "hinge": ({"surrogate": "hinge"}, {"loss_type": ["hinge"]}),
    "poly of power 1": ({"surrogate": "poly", "surrogate_options": {"power": 1}}, {"loss_type": ["hinge"]}),
    "per token": ({"length_normalized": True}, {"loss_type": ["sigmoid_norm"]}),
    "precomputed": ({"precompute_ref_log_probs": True}, {"precompute_ref_log_probs": True}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    "checkpointed": ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
    "with sft": (
        {"loss_type": ["sft", "sa_dpo"], "loss_weights": [0.3, 0.7]},
        {"loss_type": ["sft", "sigmoid"], "loss_weights": [0.3, 0.7]},
    ),
    "structure of 0": ({"margin": "structure", "gamma_max": 0.0}, {}),
}


@pytest.mark.parametrize("case", SAME)
def test_b38_neutral_is_dpo(case):
    """Loss, gradient norm, every metric of TRL's and the parameters after two steps, bit for bit."""
    ours, theirs = SAME[case]
    found, stock = dpo(**{**NEUTRAL, **ours}), dpo(trl.DPOTrainer, **theirs)
    for trainer in (found, stock):
        trainer.train()
        trainer.evaluate(preferences(4, seed=3)) if case != "precomputed" else None
    assert off(parameters(found), parameters(stock)) == 0
    assert off(parameters(found), torch.cat([p.flatten() for p in tiny_llama().parameters()])) > 1e-5
    for ours_, theirs_ in zip(found.state.log_history, stock.state.log_history, strict=True):
        assert {k: v for k, v in ours_.items() if k in theirs_ and "second" not in k and "runtime" not in k} == {
            k: v for k, v in theirs_.items() if "second" not in k and "runtime" not in k
        }


def test_b38_lengths_count_what_trl_counts_where_a_response_begins_the_row():
    """Without a prompt the first token is a response's; it has no log probability and is counted all the same."""
    losses = []
    for cls, options in (
        (SADPOTrainer, {**NEUTRAL, "length_normalized": True}),
        (trl.DPOTrainer, {"loss_type": ["sigmoid_norm"]}),
    ):
        trainer = dpo(cls, **options)
        inputs = batch(trainer)
        losses.append(loss_of(trainer, {**inputs, "completion_mask": inputs["attention_mask"]}).item())
    assert losses[0] == losses[1]


def test_b38_neutral_is_dpo_under_prompt_learning():
    losses = []
    for cls, options in ((SADPOTrainer, {**NEUTRAL, "beta": 2.0}), (trl.DPOTrainer, {"beta": 2.0})):
        torch.manual_seed(0)
        learning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        trainer = dpo(cls, tiny_llama(), peft_config=learning, **options)
        losses.append(loss_of(trainer).item())
    assert losses[0] == losses[1]
    assert losses[0] != pytest.approx(0.6931, abs=1e-4)  # virtual tokens make a difference


def test_the_names_of_further_losses_are_trls():
    import inspect
    import re

    found = re.findall(r'loss_type == "(\w+)"', inspect.getsource(trl.DPOTrainer._compute_loss))
    assert sorted(found) == sorted(STOCK_LOSSES), "upstream changed: STOCK_LOSSES of sa_dpo"


def test_b38_neutral_keeps_the_auxiliary_loss_of_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    def moe(seed):
        torch.manual_seed(seed)
        return MixtralForCausalLM(MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5, output_router_logits=True, pad_token_id=0,
        ))  # fmt: skip

    losses = [loss_of(dpo(cls, moe(0), moe(1), **o)).item() for cls, o in ((SADPOTrainer, NEUTRAL), (trl.DPOTrainer, {}))]
    assert losses[0] == losses[1]
    bare = loss_of(dpo(trl.DPOTrainer, moe(0), moe(1), router_aux_loss_coef=0.0)).item()
    assert losses[0] > bare + 0.1


# -- with a margin ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("margin", ["constant", "structure", "column"])
def test_the_loss_is_the_closed_form(name, margin):
    options, closed = CLOSED[name]
    d = [0.0, 0.1, 0.2, 1.0]
    column = {"margin": [2 * x for x in d]} if margin == "column" else {"semantic_distance": d}
    trainer = dpo(
        surrogate=name, surrogate_options=options, margin=margin, gamma_max=0.7, tau=0.4, beta=0.5, data=preferences(4, **column)
    )
    order = [trainer.train_dataset["prompt_ids"][:].index(r) for r in _prompts(trainer)]
    gamma = {"constant": [0.7] * 4, "structure": [0.7 * min(x / 0.4, 1) for x in d], "column": [2 * x for x in d]}[margin]
    rewards = rewards_of(trainer)
    assert rewards.abs().max() > 0.1
    expected = closed((rewards - torch.tensor(gamma)[order]).double()).mean()
    assert loss_of(trainer).item() == pytest.approx(expected.item(), rel=1e-5)
    shifted = closed(rewards.double()).mean()
    assert abs(loss_of(trainer).item() - shifted.item()) > 1e-3


def test_label_smoothing_is_in_the_loss_and_in_the_share_of_pairs_with_a_slope():
    options = {"surrogate": "hinge", "margin": "constant", "gamma_max": 0.3, "beta": 20.0, "max_steps": 1}
    smoothed, plain = dpo(label_smoothing=0.1, **options), dpo(**options)
    rewards, closed = rewards_of(smoothed), CLOSED["hinge"][1]
    assert (rewards - 0.3 > 1).any()
    expected = (0.9 * closed(rewards - 0.3) + 0.1 * closed(-rewards - 0.3)).mean()
    assert loss_of(smoothed).item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss_of(plain).item() == pytest.approx(closed(rewards - 0.3).mean().item(), rel=1e-5)
    for trainer in (smoothed, plain):
        trainer.train()
    # A pair won by more than the margin still has a slope the other way round.
    either = (rewards - 0.3 < 1) | (-rewards - 0.3 < 1)
    found = [t.state.log_history[0]["sa_dpo/active_frac"] for t in (smoothed, plain)]
    assert found == [either.float().mean().item(), (rewards - 0.3 < 1).float().mean().item()]
    assert found[0] > found[1]


def _prompts(trainer):
    inputs = batch(trainer)
    rows = zip(inputs["input_ids"][:4], inputs["completion_mask"][:4], strict=True)
    return [row[: int(mask.argmax())].tolist() for row, mask in rows]


def test_a_margin_is_a_shift_of_the_reference():
    """With precomputed references, ``ref_chosen_logps + gamma / beta`` in the stock trainer is the same loss."""
    stock = dpo(trl.DPOTrainer, precompute_ref_log_probs=True)
    ours = dpo(margin="constant", gamma_max=0.4, precompute_ref_log_probs=True)
    inputs = batch(stock)
    assert inputs["ref_chosen_logps"].abs().min() > 0
    expected = loss_of(stock, {**inputs, "ref_chosen_logps": inputs["ref_chosen_logps"] + 0.4 / stock.beta})
    assert loss_of(ours).item() == pytest.approx(expected.item(), abs=1e-6)


def test_switched_on_one_step_changes_the_model_and_the_metrics_say_what_was_asked():
    options = {"max_steps": 1, "beta": 2.0, "per_device_train_batch_size": 8}
    stock = dpo(trl.DPOTrainer, **options)
    trained = {m: dpo(margin=m, gamma_max=0.8, surrogate="poly", **options) for m in ("constant", "structure")}
    rewards = rewards_of(trained["structure"])
    gamma = structure_margin(batch(trained["structure"])["sa_dpo_values"], 0.8, 0.25)
    for trainer in (stock, *trained.values()):
        trainer.train()
    assert off(parameters(trained["constant"]), parameters(stock)) > 1e-5
    assert off(parameters(trained["constant"]), parameters(trained["structure"])) > 1e-5
    found = trained["structure"].state.log_history[0]
    assert found["sa_dpo/margin"] == pytest.approx(gamma.mean().item(), abs=1e-6)
    assert found["sa_dpo/satisfied_frac"] == (rewards >= gamma).float().mean().item()
    assert found["sa_dpo/active_frac"] == (rewards - gamma < 1).float().mean().item()
    assert found["rewards/margins"] == pytest.approx(rewards.mean().item(), abs=1e-5)  # the margin is not in the rewards


def test_swapped_labels_turn_the_sign_of_delta_and_leave_the_distance():
    data = preferences(4)
    swapped = data.rename_columns({"chosen": "x", "rejected": "chosen"}).rename_columns({"x": "rejected"})
    one, other = dpo(data=data), dpo(data=swapped)
    assert off(rewards_of(one), -rewards_of(other)) < 1e-6
    assert batch(one)["sa_dpo_values"].equal(batch(other)["sa_dpo_values"])


# -- references ---------------------------------------------------------------------------------------------------------


def test_reference_free_is_the_policys_own_log_ratio_and_runs_no_reference():
    """With lengths divided out and a constant margin: SimPO's ``-log sigmoid(beta * (mean - mean) - gamma)``."""
    model = tiny_llama()
    trainer = dpo(model=model, reference_free=True, length_normalized=True, margin="constant", gamma_max=0.5, beta=2.0)
    assert trainer.ref_model is None
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    found = loss_of(trainer)
    handle.remove()
    assert len(forwards) == 1
    inputs = batch(trainer)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    mask = inputs["completion_mask"][:, 1:]
    logps = (logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0] * mask).sum(1) / mask.sum(1)
    chosen, rejected = logps.chunk(2)
    assert found.item() == pytest.approx(-logsigmoid(2.0 * (chosen - rejected) - 0.5).mean().item(), abs=1e-6)
    trainer.train()
    assert not trainer.args.precompute_ref_log_probs
    with pytest.raises(UnsupportedError, match="after training with sa_dpo_reference_free"):
        trainer.evaluate(preferences(4))


def test_a_new_adapter_has_the_base_model_as_its_reference():
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = dpo(model=tiny_llama(), margin="constant", gamma_max=0.4, surrogate="exp", max_steps=4, peft_config=config)
    assert loss_of(trainer).item() == pytest.approx(torch.e**0.4, abs=1e-6)  # Delta = 0 at the first step
    before = trainer.compute_ref_log_probs(trainer.model, batch(trainer))
    trainer.train()
    assert loss_of(trainer).item() < torch.e**0.4 - 1e-4
    assert all(a.equal(b) for a, b in zip(before, trainer.compute_ref_log_probs(trainer.model, batch(trainer)), strict=True))


def test_b39_a_trained_adapter_is_its_own_fixed_reference():
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert off(model(input_ids=torch.tensor([[5, 6, 7]])).logits, base) > 1e-2
    trainer = dpo(model=model, margin="constant", gamma_max=0.4, max_steps=5)
    assert off(rewards_of_adapter(trainer), torch.zeros(4)) <= 1e-6
    before = trainer.compute_ref_log_probs(trainer.model, batch(trainer))
    trainer.train()
    assert off(rewards_of_adapter(trainer), torch.zeros(4)) > 1e-5
    assert all(a.equal(b) for a, b in zip(before, trainer.compute_ref_log_probs(trainer.model, batch(trainer)), strict=True))


def rewards_of_adapter(trainer):
    trainer._metrics["train"].clear()
    loss_of(trainer)
    return torch.tensor(trainer._metrics["train"]["rewards/margins"])


# -- accumulation, padding, evaluation ----------------------------------------------------------------------------------


def test_b35_b33_metrics_of_a_window_know_no_cut():
    """One step on the same eight pairs as 8x1, 4x2 and 1x8: the distances go with their pairs."""
    runs = []
    for rows, steps in ((8, 1), (4, 2), (1, 8)):
        cut = {"max_steps": 1, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
        runs.append(dpo(**cut, surrogate="poly", gamma_max=0.8, beta=1.0))
        runs[-1].train()
        assert off(parameters(runs[-1]), parameters(runs[0])) <= 1e-6
        for key in ("loss", "sa_dpo/margin", "sa_dpo/satisfied_frac", "sa_dpo/active_frac"):
            bound = 1e-5 if key == "loss" else 1e-6
            assert runs[-1].state.log_history[0][key] == pytest.approx(runs[0].state.log_history[0][key], abs=bound)


def test_b33_the_metrics_know_no_padding_and_weigh_pairs_alike_in_a_short_last_window():
    logs = {}
    for rows, width in ((4, None), (4, 32), (8, None)):
        data = preferences(12)
        trainer = dpo(
            data=data, eval_dataset=data, per_device_eval_batch_size=rows, pad_to_multiple_of=width, beta=1.0, surrogate="hinge"
        )
        found = trainer.evaluate()
        logs[rows, width] = [found[f"eval_sa_dpo/{k}"] for k in ("margin", "satisfied_frac", "active_frac")]
    first = logs[4, None]
    assert 0 < first[1] < 1
    for other in logs.values():
        assert other == pytest.approx(first, abs=1e-6)


def test_b36_outputs_are_returned_and_unknown_arguments_passed_on():
    trainer = dpo(eval_dataset=preferences(4, seed=2))
    with pytest.warns(FutureWarning, match="return_outputs"):
        loss, outputs = trainer.compute_loss(trainer.model, batch(trainer), return_outputs=True, num_items_in_batch=4)
    assert loss.item() == loss_of(trainer).item()
    assert outputs.logits.shape[0] == 8
    assert {"eval_loss", "eval_sa_dpo/margin"} <= set(trainer.evaluate())


def test_precomputed_references_of_data_given_to_evaluate():
    trainer = dpo(precompute_ref_log_probs=True)
    live = dpo()
    data = preferences(4, seed=5)
    seen = set()  # a Llama takes any keyword, so only looking shows what reaches a model
    for model in (trainer.model, trainer.ref_model, live.model, live.ref_model):
        model.register_forward_pre_hook(lambda _model, _args, given: seen.update(given), with_kwargs=True)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(live.evaluate(data)["eval_loss"], abs=1e-6)
    assert "input_ids" in seen
    assert not {"sa_dpo_values", "semantic_distance"} & seen


# -- bad input ----------------------------------------------------------------------------------------------------------

WRONG = {
    "surrogate": ({"sa_dpo_surrogate": "pol"}, ConfigError, ["surrogate='pol'", "did you mean 'poly'", "'logistic'"]),
    "option of it": (
        {"sa_dpo_surrogate": "poly", "sa_dpo_surrogate_options": {"powr": 2}}, ConfigError, ["'powr'", "did you mean 'power'"]
    ),
    "power": ({"sa_dpo_surrogate": "poly", "sa_dpo_surrogate_options": '{"power": 0.5}'}, ConfigError, ["power=0.5", ">= 1"]),
    "option of none": ({"sa_dpo_surrogate_options": {"power": 2}}, ConfigError, ["surrogate 'logistic'", "'power'"]),
    "no mapping": ({"sa_dpo_surrogate_options": "[2]"}, ConfigError, ["sa_dpo_surrogate_options='[2]'", "mapping"]),
    "no JSON": ({"sa_dpo_surrogate_options": "power=2"}, ConfigError, ["sa_dpo_surrogate_options='power=2'", "JSON"]),
    "margin": ({"sa_dpo_margin": "structur"}, ConfigError, ["sa_dpo_margin='structur'", "did you mean 'structure'"]),
    "gamma_max": ({"sa_dpo_gamma_max": -0.1}, ConfigError, ["sa_dpo_gamma_max=-0.1", ">= 0"]),
    "gamma_max not finite": ({"sa_dpo_gamma_max": float("nan")}, ConfigError, ["sa_dpo_gamma_max=nan"]),
    "tau": ({"sa_dpo_tau": 0.0}, ConfigError, ["sa_dpo_tau=0.0", "> 0 and <= 1"]),
    "beta": ({"beta": 0.0}, ConfigError, ["beta=0.0", "> 0"]),
    "smoothing": ({"label_smoothing": 0.5}, ConfigError, ["label_smoothing=0.5", "[0, 0.5)"]),
    "loss_type": ({"loss_type": ["sigmoid"]}, ConfigError, ["'sigmoid'", "'sa_dpo'", "DPOTrainer"]),
    "further loss": (
        {"loss_type": ["sa_dpo", "sigmoid_nrm"]}, ConfigError, ["'sigmoid_nrm'", "did you mean 'sigmoid_norm'", "'aot_unpaired'"]
    ),
    "loss_type twice": ({"loss_type": ["sa_dpo", "sa_dpo"]}, ConfigError, ["must hold 'sa_dpo' once"]),
    "loss_type misspelt": ({"loss_type": ["sadpo"]}, ConfigError, ["did you mean 'sa_dpo'"]),
    "padding_free": ({"padding_free": True}, UnsupportedError, ["padding_free=True", "False"]),
    "liger": ({"use_liger_kernel": True}, UnsupportedError, ["use_liger_kernel=True"]),
    "wpo": ({"use_weighting": True}, UnsupportedError, ["use_weighting=True"]),
    "divergence": ({"f_divergence_type": "js_divergence"}, UnsupportedError, ["f_divergence_type='js_divergence'", "reverse_kl"]),
    "ld_alpha": ({"ld_alpha": 0.5}, UnsupportedError, ["ld_alpha=0.5"]),
    "free, precomputed": (
        {"sa_dpo_reference_free": True, "precompute_ref_log_probs": True}, ConfigError, ["precompute_ref_log_probs=True"]
    ),
    "free, synchronised": ({"sa_dpo_reference_free": True, "sync_ref_model": True}, ConfigError, ["sync_ref_model=True"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_by_name(case, tmp_path):
    options, error, words = WRONG[case]
    with pytest.raises(error) as caught:
        SADPOConfig(str(tmp_path), **{**SETTINGS, **options})
    for word in words:
        assert word in str(caught.value)


BARE = {"semantic_distanc": [0.5] * 8}
COLUMNS = {
    "missing": (
        {"data": preferences(**BARE)},
        ["train_dataset: sa_dpo_distance_column='semantic_distance'", "did you mean 'semantic_distanc'"],
    ),
    "missing in evaluation": (
        {"eval_dataset": {"held": preferences(8, **BARE)}},
        ["eval_dataset['held']", "semantic_distance", "sa_dpo_margin='constant'"],
    ),
    "missing margin": ({"margin": "column"}, ["sa_dpo_margin_column='margin'", "train_dataset"]),
    "above 1": ({"data": preferences(2, semantic_distance=[0.3, 1.2])}, ["'semantic_distance': 1.2 in row 1", "[0, 1]"]),
    "not a number": ({"data": preferences(2, semantic_distance=[0.3, float("nan")])}, ["nan in row 1"]),
    "none": ({"data": preferences(2, semantic_distance=[0.3, None])}, ["None in row 1"]),
    "below 0": ({"margin": "column", "data": preferences(2, margin=[0.3, -1.0])}, ["'margin': -1.0 in row 1", ">= 0"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_that_is_missing_or_wrong_is_refused_before_anything_is_built(case):
    options, words = COLUMNS[case]
    with pytest.raises(ConfigError) as caught:
        dpo(**options)
    for word in words:
        assert word in str(caught.value)


def test_evaluate_refuses_data_without_the_column():
    with pytest.raises(ConfigError, match="eval_dataset: sa_dpo_distance_column='semantic_distance'"):
        dpo().evaluate(preferences(4, other=[1] * 4))


def test_a_row_without_the_column_is_refused_by_name():
    collate = PairValues(lambda examples: {}, "semantic_distance", 1.0)
    with pytest.raises(ConfigError, match=r"column='semantic_distance'.*did you mean 'semantic_dist'"):
        collate([{"semantic_distance": 0.5}, {"semantic_dist": 0.5}])


def test_a_stream_is_trained_on_and_its_values_looked_at():
    stream = preferences(8).to_iterable_dataset()
    trainer = dpo(data=stream, surrogate="poly")
    trainer.train()
    assert trainer.state.log_history[0]["sa_dpo/margin"] > 0
    with pytest.raises(ConfigError, match=r"'semantic_distance': 7.0 in row 0"):
        dpo(data=preferences(8, semantic_distance=[7.0] * 8).to_iterable_dataset()).train()


def test_another_config_or_a_reference_that_is_not_used_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs a SADPOConfig, got a DPOConfig"):
        SADPOTrainer(tiny_llama(), args=trl.DPOConfig(str(tmp_path), **SETTINGS), train_dataset=preferences())
    with pytest.raises(UnsupportedError, match="reference_free=True"):
        dpo(model=tiny_llama(), ref_model=tiny_llama(1), reference_free=True)


# -- reward models ------------------------------------------------------------------------------------------------------


def test_the_margin_column_makes_stock_reward_training_the_same_loss(tmp_path):
    from transformers import LlamaForSequenceClassification

    data = add_margin(preferences(4), gamma_max=0.6, tau=0.5)
    assert data["margin"][:] == pytest.approx([0.6 * min(d / 0.5, 1) for d in data["semantic_distance"]])
    config = policy_and_reference()[0].config
    config.num_labels = 1
    keep = {"max_steps", "logging_steps", "per_device_train_batch_size", "report_to", "use_cpu", "bf16", "disable_tqdm",
            "gradient_checkpointing", "save_strategy"}  # fmt: skip
    args = trl.RewardConfig(str(tmp_path), **{k: v for k, v in SETTINGS.items() if k in keep})
    model = LlamaForSequenceClassification(config)
    trainer = trl.RewardTrainer(model, args=args, train_dataset=data, processing_class=tiny_tokenizer())
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    margins = inputs["margin"]
    found = trainer.compute_loss(trainer.model, dict(inputs))
    with torch.no_grad():
        plain = {k: v for k, v in inputs.items() if k != "margin"}
        chosen, rejected = trainer.model(**plain).logits.squeeze(-1).chunk(2)
    assert sorted(margins.tolist()) == pytest.approx(sorted(data["margin"][:]))
    assert found.item() == pytest.approx(pair_losses(surrogate("logistic"), chosen - rejected, margins).mean().item(), abs=1e-6)
    with pytest.raises(ConfigError, match="distance_column='d'"):
        add_margin(preferences(2), distance_column="d")
    assert add_margin(preferences(2), margin="constant", gamma_max=0.3)["margin"][:] == [0.3, 0.3]
    for form in ("torch", "numpy"):
        formed = add_margin(preferences(4).with_format(form), gamma_max=0.6, tau=0.5).with_format(None)
        assert formed["margin"][:] == pytest.approx(data["margin"][:])
    assert isinstance(add_margin(datasets.DatasetDict(train=preferences(2))), datasets.DatasetDict)
