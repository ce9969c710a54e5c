"""Bayesian LoRA: the contract, one coherent weight sample, the KL of every step."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import peft
import pytest
import torch
from torch.nn.functional import softplus

import hfplug
from hfplug import ConfigError, UnsupportedError
from hfplug.optimization import prepare
from hfplug.testing import models
from hfplug.testing.tuner import FAMILIES, TunerContract
from hfplug.tuners import BayesLoraConfig, posterior
from hfplug.tuners.bayes_lora.layer import BayesLoraLinear, Rho
from hfplug.tuners.bayes_lora.prior import kl, kl_gaussian, kl_mixture, log_mixture

NEVER = -200.0  # softplus(-200) is exactly 0 in float32


class TestBayesLoraContract(TunerContract):
    method, options, dropout = "bayes_lora", {"r": 4, "train_size": 50}, {"lora_dropout": 0.2}
    merge: ClassVar[dict[str, Any]] = {}
    identity_at_init, export = "evaluation", "exact"


class TestBayesLoraOfAAlone(TunerContract):
    method, options = "bayes_lora", {"r": 4, "train_size": 50, "random_factors": "A", "prior": "gaussian"}
    export = "exact"
    merge: ClassVar[dict[str, Any]] = {}


def wrap(model, stir=0.1, **options):
    chosen = {"type": "bayes_lora", "r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "train_size": 50}
    chosen |= {"kl_weight": 1.0, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(model, hfplug.tuners.config(**chosen))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in layers(model):
            for weight in (layer.bayes_lora_A["default"].weight, layer.bayes_lora_B["default"].weight):
                weight.add_(torch.randn(weight.shape, generator=generator) * stir)
    return model


def layers(model):
    return [layer for _, layer in hfplug.tuners.tuner_layers(model, "bayes_lora")]


def ids(rows=2, length=10):
    return torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def logits(model, batch=None, training=False, **kwargs):
    with torch.no_grad():
        return model.train(training)(input_ids=ids() if batch is None else batch, **kwargs).logits


def one_layer(in_features=6, out_features=5, r=2, sigma=0.3, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = BayesLoraConfig(r=r, lora_alpha=2 * r, train_size=10, **options)
    layer = BayesLoraLinear(torch.nn.Linear(in_features, out_features, bias=False), "default", config, "toy").to(dtype)
    with torch.no_grad():
        layer.bayes_lora_B["default"].weight.normal_()
        for _, _, rho in layer.factors("default"):
            rho.rho.fill_(math.log(math.expm1(sigma)))
    return layer


# -- what a sample is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.3, "use_rslora": True}, {"random_factors": "A"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_variance_a_sample_is_the_mean_is_lora_bit_for_bit(family, options):
    shared = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    shared |= {k: v for k, v in options.items() if k != "random_factors"}
    lora = peft.get_peft_model(models.TINY_MODELS[family](), peft.LoraConfig(**shared, init_lora_weights=False))
    ours = wrap(models.TINY_MODELS[family](), **options)
    with torch.no_grad():
        for name, weight in lora.named_parameters():
            if "lora_" in name:
                ours.get_parameter(name.replace("lora_", "bayes_lora_")).copy_(weight)
        for layer in layers(ours):
            for _, _, rho in layer.factors("default"):
                rho.rho.fill_(NEVER)
    assert torch.equal(logits(ours), logits(lora))
    with posterior(ours, sample=4):
        assert torch.equal(logits(ours), logits(lora))
    gradients = []
    for model in (lora, ours):
        torch.manual_seed(5)  # dropout draws the same
        model.train()(input_ids=ids(), labels=ids()).loss.backward()
        named = model.named_parameters()
        gradients.append({n.replace("bayes_lora_", "lora_"): p.grad for n, p in named if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def test_a_sample_has_rank_r_and_the_mean_of_samples_has_not():
    layer = one_layer(12, 10, r=3)
    x = torch.eye(12, dtype=torch.float64)
    deltas = []
    for index in range(5):
        draw = ("posterior", index)
        sampled = {f: layer.sample("default", f, mean, rho, draw) for f, mean, rho in layer.factors("default")}
        deltas.append((sampled["B"] @ sampled["A"]).detach())
        assert torch.linalg.svdvals(deltas[-1])[3] < 1e-12
        layer.bayes_lora_config["default"].eval_mode, layer.bayes_lora_config["default"].seed = "sample", 0
    assert torch.linalg.matrix_rank(sum(deltas) / 5) > 3
    layer.bayes_lora_config["default"].eval_mode = "mean"
    for factor, mean, rho in layer.factors("default"):
        eps = layer.noise("default", factor, ("posterior", 1), rho.rho)
        assert torch.equal(layer.sample("default", factor, mean, rho, ("posterior", 1)), mean + softplus(rho.rho) * eps)
    a, b = layer.lora_factors("default")
    assert torch.allclose(layer.eval().delta("default", x).T, b @ a, atol=1e-14)


def test_moments_of_the_push_forward():
    """Mean, variance and covariance of dW, in the card's closed form, over 2e5 samples; the error shrinks as 1/sqrt(S)."""
    layer = one_layer(3, 2, r=2, sigma=0.4)
    (_, mu_a, rho_a), (_, mu_b, rho_b) = layer.factors("default")
    with torch.no_grad():
        rho_a.rho.add_(0.7)
        sb = float(rho_b.sigma()[0, 0])
        sa = float(rho_a.sigma()[0, 0])
        mu_a, mu_b = mu_a.detach() + 0.8, mu_b.detach()
        # One call of the noise for all samples: its stream is the layer's, its shape the test's.
        big = torch.empty(200_000, 1, dtype=torch.float64)
        a = mu_a + sa * layer.noise("default", "A", ("posterior", 1), big.expand(-1, 6).contiguous()).view(-1, 2, 3)
        b = mu_b + sb * layer.noise("default", "B", ("posterior", 1), big.expand(-1, 4).contiguous()).view(-1, 2, 2)
        w = b @ a
    mean = mu_b @ mu_a
    errors = [(w[:n].mean(0) - mean).square().mean().sqrt() for n in (2_000, 200_000)]
    assert errors[1] < errors[0] / 4  # 1/sqrt(100) is 1/10; the factor leaves room for chance, not for a bias
    variance = mu_a.square().T @ torch.full((2, 1), sb**2).double()  # sum_k muA_kj² sB²
    variance = variance.T + (mu_b.square().sum(1, keepdim=True) * sa**2) + 2 * sa**2 * sb**2
    assert torch.allclose(w.var(0), variance, rtol=0.01)
    row = (w[:, 0, 0] - w[:, 0, 0].mean()) * (w[:, 0, 1] - w[:, 0, 1].mean())  # one row of dW, two columns
    assert float(row.mean()) == pytest.approx(float((mu_a[:, 0] * mu_a[:, 1]).sum() * sb**2), rel=0.03)
    other = (w[:, 0, 0] - w[:, 0, 0].mean()) * (w[:, 1, 1] - w[:, 1, 1].mean())
    assert abs(float(other.mean())) < 4 * float(other.std()) / len(w) ** 0.5  # no shared row or column: uncorrelated


def test_parameters_are_twice_those_of_lora():
    lora = peft.get_peft_model(models.tiny_llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
    both, a_alone = wrap(models.tiny_llama()), wrap(models.tiny_llama(), random_factors="A")
    count = lora.get_nb_trainable_parameters()[0]
    assert both.get_nb_trainable_parameters()[0] == 2 * count
    extra = sum(4 * layer.in_features for layer in layers(a_alone))
    assert a_alone.get_nb_trainable_parameters()[0] == count + extra


def test_a_sample_is_its_number_and_the_global_generator_is_left_alone():
    model = wrap(models.tiny_llama(), sigma_init=0.5)
    before = torch.get_rng_state()
    found = []
    for sample in (0, 1, 0):
        with posterior(model, sample=sample):
            found.append(logits(model))
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    logits(model, training=True)
    assert torch.equal(torch.get_rng_state(), before)
    other = wrap(models.tiny_llama(), sigma_init=0.5, seed=1)
    with posterior(other, sample=0):
        assert not torch.allclose(logits(other), found[0], atol=1e-3)


def test_modules_and_factors_draw_apart():
    model = wrap(models.tiny_llama())
    noises = [
        layer.noise("default", factor, ("posterior", 0), torch.empty(4))
        for layer in layers(model)
        for factor in ("A", "B")
    ]  # fmt: skip
    assert len({tuple(n.tolist()) for n in noises}) == len(noises) == 28


def test_the_context_decides_over_mode_and_configuration_and_ends():
    model = wrap(models.tiny_llama(), sigma_init=0.5)
    mean = logits(model)
    training = logits(model, training=True)
    assert not torch.allclose(training, mean, atol=1e-3)
    with posterior(model, "mean"):
        assert torch.equal(logits(model, training=True), mean)
        with posterior(model, 3):
            third = logits(model)
        assert torch.equal(logits(model), mean)
    with pytest.raises(RuntimeError, match="boom"), posterior(model, 3):
        raise RuntimeError("boom")
    assert torch.equal(logits(model), mean)
    sampling = wrap(models.tiny_llama(), sigma_init=0.5, eval_mode="sample", seed=0)
    with posterior(sampling, 0):
        expected = logits(sampling)
    assert torch.equal(logits(sampling), expected)
    assert not torch.equal(expected, mean)
    assert torch.equal(logits(wrap(models.tiny_llama(), train_mode="mean"), training=True), mean)
    assert not torch.equal(third, mean)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_network_writes_a_whole_sequence(family, beams):
    """Left-padded generation from one sample: with a cache, with a static one, and by recomputation alike."""
    model, batch = wrap(models.TINY_MODELS[family](), sigma_init=0.5).eval(), ids()
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    shared = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "eos_token_id": None, "pad_token_id": models.PAD}
    shared |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    with posterior(model, 1):
        cached, plain = (model.generate(batch, **shared, use_cache=use) for use in (True, False))
    with posterior(model, 2):
        other = model.generate(batch, **shared)
    assert torch.equal(cached.sequences, plain.sequences)
    assert max((a - b).abs().max() for a, b in zip(cached.logits, plain.logits, strict=True)) <= 1e-5
    assert not torch.allclose(torch.stack(other.logits), torch.stack(cached.logits), atol=1e-3)


# -- the prior ----------------------------------------------------------------------------------------------------------


def test_kl_to_a_gaussian_is_torchs():
    mean, sigma = torch.randn(50).double(), torch.rand(50).double() + 0.1
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, sigma), torch.distributions.Normal(torch.zeros(50).double(), 0.7)
    ).sum()
    assert float(kl_gaussian(mean, sigma, 0.7)) == pytest.approx(float(expected), rel=1e-12)
    assert float(kl_gaussian(torch.zeros(3), torch.full((3,), 0.5), 0.5)) == 0.0


@pytest.mark.parametrize("options", [{}, {"prior_sd": 0.4, "prior_sd_narrow": 0.01, "prior_mix": 0.2}], ids=["paper", "other"])
def test_kl_to_the_mixture_is_unbiased(options):
    """Against quadrature of the density, within the standard error of the estimate; and the density integrates to 1."""
    config = BayesLoraConfig(**options)
    grid = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    assert float(torch.trapezoid(log_mixture(grid, config).exp(), grid)) == pytest.approx(1, abs=1e-9)
    for mean, sigma in ((0.0, 0.3), (0.2, 0.05), (-1.0, 0.5)):
        q = torch.distributions.Normal(torch.tensor(mean).double(), torch.tensor(sigma).double())
        log_q = q.log_prob(grid)
        exact = float(torch.trapezoid(log_q.exp() * (log_q - log_mixture(grid, config)), grid))
        eps = torch.randn(100_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        m, s = torch.tensor([mean]).double(), torch.tensor([sigma]).double()
        each = torch.stack([kl_mixture(m, s, e, config) for e in eps[:400]])
        estimate = float(kl_mixture(m, s, eps, config))
        assert abs(estimate - exact) < 5 * float(each.std()) / len(eps) ** 0.5
        assert abs(estimate - exact) < 0.02 * abs(exact)


def test_the_scales_at_the_start():
    layer = layers(wrap(models.tiny_llama(), sigma_init=0.1))[0]
    assert layer.bayes_lora_rho_A["default"].sigma().mean().item() == pytest.approx(0.1 / math.sqrt(3 * 32), rel=1e-3)
    assert layer.bayes_lora_rho_B["default"].sigma().mean().item() == pytest.approx(0.1 / math.sqrt(4), rel=1e-3)


def test_the_pair_of_draws_cancels_the_odd_part():
    """Where the density is nearly linear in log, plus and minus the noise give nearly the same as its exact mean."""
    config = BayesLoraConfig(prior_sd=50.0, prior_sd_narrow=50.0)
    mean, sigma = torch.full((1,), 30.0).double(), torch.full((1,), 1.0).double()
    values = [float(kl_mixture(mean, sigma, torch.full((1,), e).double(), config)) for e in (0.1, 1.0, 2.0)]
    assert max(values) - min(values) < 1e-2  # one draw alone moves it by 30·2/50² = 0.024


def test_sigma_is_right_where_softplus_is_small():
    for sigma in (1e-6, 1e-3, 0.3, 5.0):
        assert float(Rho(torch.Size([1]), sigma).sigma()) == pytest.approx(sigma, rel=1e-3)


# -- the KL of a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["gaussian", "scale_mixture"])
@pytest.mark.parametrize("micro", [1, 4])
def test_the_kl_enters_once_per_step_whatever_the_accumulation(prior, micro):
    """After one SGD step the parameters are those of ``loss + KL/train_size``, differentiated in one piece."""
    expected, found = (wrap(models.tiny_llama(), prior=prior, train_size=7, kl_weight=0.5) for _ in range(2))
    batch = ids(rows=4)
    base = expected.base_model
    expected.train()
    loss = expected(input_ids=batch, labels=batch).loss + 0.5 / 7 * base.kl_loss()
    parameters = {n: p for n, p in expected.named_parameters() if p.requires_grad}
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    optimizer = torch.optim.SGD([p for p in found.parameters() if p.requires_grad], lr=0.1)
    found.train()
    for part in batch.chunk(micro):
        (found(input_ids=part, labels=part).loss / micro).backward()
    optimizer.step()
    for name, parameter in found.named_parameters():
        if name in gradients:
            moved = (parameters[name].detach() - 0.1 * gradients[name] - parameter.detach()).abs().max()
            assert moved <= 1e-6, name
    assert all(layer.steps("default") == 1 for layer in layers(found))


def test_a_step_draws_new_weights_and_its_micro_batches_do_not():
    model = wrap(models.tiny_llama(), sigma_init=0.5)
    first = logits(model, training=True)
    assert torch.equal(logits(model, training=True), first)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    assert not torch.allclose(logits(model, training=True), first, atol=1e-3)


def test_a_fused_optimizer_that_unscales_by_itself_gets_the_same_kl():
    """Where a gradient scaler leaves unscaling to the optimizer, what is added must be scaled too."""
    states = []
    for scaled in (False, True):
        model = wrap(models.tiny_llama(), train_size=1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        loss = model.train()(input_ids=ids(), labels=ids()).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        states.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
    for name, value in states[0].items():
        assert (states[1][name] - value).abs().max() <= 1e-6, name


def test_the_ramp():
    config = BayesLoraConfig(train_size=10, kl_weight=2.0, kl_start_step=2, kl_warmup_steps=4)
    assert [config.kl_coefficient(s) * 5 for s in range(8)] == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1, 1])
    assert BayesLoraConfig(train_size=10, kl_weight=1.0).kl_coefficient(0) == 0.1
    assert BayesLoraConfig(kl_weight=0).kl_coefficient(0) == 0


def test_only_what_took_part_in_a_step_is_drawn_to_the_prior():
    """An adapter that another optimizer trains, or that had no gradient, keeps its weights and its count."""
    model = wrap(models.tiny_llama())
    model.add_adapter("b", model.peft_config["default"])
    layer = layers(model)[0]
    before = layer.bayes_lora_A["b"].weight.detach().clone()
    for name, parameter in model.named_parameters():
        if ".b." in name:
            parameter.requires_grad_(True)  # trainable, but not active
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # holds both
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    assert torch.equal(layer.bayes_lora_A["b"].weight, before)
    assert (layer.steps("default"), layer.steps("b")) == (1, 0)
    twin = wrap(models.tiny_llama())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin.train()(input_ids=ids(), labels=ids()).loss.backward()
    kept = layers(model)[0].steps("default")
    optimizer.step()
    assert layers(model)[0].steps("default") == kept
    assert layers(twin)[0].steps("default") == 1


def test_an_unknown_number_of_tokens_is_refused_before_the_weights_move():
    model = wrap(models.tiny_llama(), train_size=None)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    with pytest.raises(ConfigError, match=r"prepare\(trainer\).*train_size"):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("sft", [False, True], ids=["trainer", "sft"])
def test_prepare_counts_the_label_tokens_and_logs_the_kl(sft):
    model = wrap(models.tiny_llama(), train_size=None)
    data = models.tiny_lm_dataset()
    trainer = models.tiny_trainer(model, sft=sft, train_dataset=data, max_steps=2, logging_steps=1, weight_decay=0.1)
    state = torch.get_rng_state()
    prepare(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    expected = sum(len(row) - 1 for row in data["labels"])
    assert layers(trainer.model)[0].bayes_lora_state.counted == {"default": expected}
    assert trainer.model.peft_config["default"].train_size is None  # what another dataset must not inherit
    before = float(trainer.model.base_model.kl_loss().detach())
    trainer.train()
    assert trainer.state.log_history[0]["bayes_lora/kl"] == pytest.approx(before, rel=1e-5)
    rho = layers(trainer.model)[0].bayes_lora_rho_A["default"].rho
    group = next(g for g in trainer.optimizer.param_groups if any(p is rho for p in g["params"]))
    assert group["weight_decay"] == 0
    assert group["lr"] == pytest.approx(10 * trainer.args.learning_rate)


def test_prepare_counts_the_examples_of_a_classifier_and_refuses_what_it_cannot_count():
    from datasets import Dataset
    from transformers import DataCollatorWithPadding

    rows = [{"input_ids": [5, 6, 7], "labels": i % 2} for i in range(6)]
    model = wrap(models.tiny_llama(), train_size=None)
    trainer = models.tiny_trainer(model, train_dataset=Dataset.from_list(rows))
    trainer.data_collator = DataCollatorWithPadding(models.tiny_tokenizer())
    prepare(trainer)
    assert layers(model)[0].bayes_lora_state.counted == {"default": 6}
    again = models.tiny_trainer(wrap(models.tiny_llama(), train_size=None))
    again.train_dataset = iter([])
    with pytest.raises(UnsupportedError, match="train_size"):
        prepare(again)


# -- bases --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split", ["one", "A and B", "rho first", "each", "closure", "wrapped", "zeros instead of none"],
)  # fmt: skip
def test_however_the_parameters_are_stepped_the_kl_enters_once(split):
    """Several optimizers, closures, optimizers in optimizers: the weights of one plain optimizer, and one new draw."""
    results = []
    for how in ("one", split):
        model = wrap(models.tiny_llama(), prior="gaussian", train_size=1).train()
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        parts = {
            "A and B": [[p for n, p in named.items() if k in n] for k in ("lora_A", "lora_B", "rho_A", "rho_B")],
            "rho first": [[p for n, p in named.items() if ("rho" in n) is w] for w in (True, False)],
            "each": [[p] for p in named.values()],
        }.get(how, [list(named.values())])
        optimizers = [torch.optim.SGD(part, lr=1e-3) for part in parts]
        if how == "wrapped":
            optimizers = [Lookahead(optimizers[0])]

        def closure(model=model, optimizers=optimizers):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=split != "zeros instead of none")
            loss = model(input_ids=ids(), labels=ids()).loss
            loss.backward()
            return loss

        for _ in range(2):
            if how == "closure":
                optimizers[0].step(closure)
            else:
                closure()
                for optimizer in optimizers:
                    optimizer.step()
        assert {layer.steps("default") for layer in layers(model)} == {2}
        results.append({n: p.detach().clone() for n, p in named.items()})
    moved = max((results[0][n] - p).abs().max() for n, p in wrap(models.tiny_llama()).named_parameters() if "rho" in n)
    assert moved > 1e-4
    for name, value in results[0].items():
        assert (results[1][name] - value).abs().max() <= 1e-6, name


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another inside its own step, as ``ZeroRedundancyOptimizer`` does."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_inactive_adapter_with_zero_gradients_is_left_alone():
    model = wrap(models.tiny_llama())
    model.add_adapter("b", model.peft_config["default"])
    for _, parameter in model.named_parameters():
        if parameter.requires_grad or "bayes_lora" in _:
            parameter.requires_grad_(True)
            parameter.grad = torch.zeros_like(parameter)
    layer = layers(model)[0]
    before = layer.bayes_lora_A["b"].weight.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    assert torch.equal(layer.bayes_lora_A["b"].weight, before)
    assert (layer.steps("default"), layer.steps("b")) == (1, 0)


def test_variances_alone_can_be_trained_and_the_mean_alone_leaves_them():
    model = wrap(models.tiny_llama()).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("rho" in name)
    rho = layers(model)[0].bayes_lora_rho_A["default"].rho
    before = rho.detach().clone()
    step(model)
    assert not torch.equal(rho, before)
    assert layers(model)[0].steps("default") == 1
    model = wrap(models.tiny_llama(), train_mode="mean").train()
    rho, mean = layers(model)[0].bayes_lora_rho_A["default"].rho, layers(model)[0].bayes_lora_A["default"].weight
    before = rho.detach().clone(), mean.detach().clone()
    step(model)
    assert torch.equal(rho, before[0])
    assert not torch.equal(mean, before[1])


def step(model, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()


def test_weight_decay_on_rho_is_said_once():
    model = wrap(models.tiny_llama()).train()
    with pytest.warns(UserWarning, match="weight decay acts on rho"):
        step(model, weight_decay=0.1)


def test_a_frozen_adapter_in_training_is_its_mean():
    """TRL keeps the reference policy as a frozen adapter of a model in training mode."""
    model = wrap(models.tiny_llama(), sigma_init=0.5)
    mean = logits(model)
    assert not torch.equal(logits(model, training=True), mean)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(logits(model, training=True), mean)


def test_the_seed_counts_in_training():
    first, other = (logits(wrap(models.tiny_llama(), sigma_init=0.5, seed=s), training=True) for s in (0, 1))
    assert not torch.allclose(first, other, atol=1e-3)


def test_prepare_twice_and_training_twice():
    model = wrap(models.tiny_llama(), train_size=None)
    trainer = models.tiny_trainer(model, max_steps=1)
    prepare(trainer)
    prepare(trainer)
    trainer.train()
    assert sorted({g["lr"] / trainer.args.learning_rate for g in trainer.optimizer.param_groups}) == pytest.approx([1, 10])
    means = {id(mean) for layer in layers(model) for _, mean, _ in layer.factors("default")}
    assert all(g["weight_decay"] == 0 for g in trainer.optimizer.param_groups if means & {id(p) for p in g["params"]})
    trainer.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    given = models.tiny_trainer(model, max_steps=1)
    given.optimizer, given.lr_scheduler = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match="apply_optimizer_groups"):
        prepare(given)


def test_half_precision_keeps_rho_where_it_counts():
    """On a bfloat16 base the adapter is float32; cast to bfloat16, sigma is still computed wide."""
    model = wrap(models.tiny_llama().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    layer = layers(model.to(torch.bfloat16))[0]
    assert layer.bayes_lora_rho_A["default"].sigma().dtype == torch.float32
    assert layer.bayes_lora_steps["default"].dtype == torch.int64
    value = kl(
        layer.bayes_lora_A["default"].weight.float(), softplus(layer.bayes_lora_rho_A["default"].rho.float()),
        torch.zeros(1), layer.bayes_lora_config["default"],
    )  # fmt: skip
    assert value.dtype == torch.float32


WRONG = {
    "r": 0, "lora_alpha": 0, "lora_dropout": 1.0, "random_factors": "B", "sigma_init": 0.0, "prior": "laplace", "prior_sd": 0,
    "prior_sd_narrow": -1.0, "prior_mix": 1.0, "kl_weight": -1.0, "train_size": 0, "kl_start_step": -1, "kl_warmup_steps": -1,
    "rho_lr_multiplier": 0.0, "train_mode": "map", "eval_mode": "mc", "seed": -1,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        hfplug.tuners.config(type="bayes_lora", **{name: WRONG[name]})


def test_merging_a_sample_is_refused():
    model = wrap(models.tiny_llama(), eval_mode="sample")
    before = logits(model)
    with pytest.raises(UnsupportedError, match="eval_mode"):
        model.merge_adapter()
    assert torch.equal(logits(model), before)
