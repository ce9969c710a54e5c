"""What the posterior of Bayesian LoRA says: predictions, calibration metrics against their oracles, conversion of a LoRA."""

from __future__ import annotations

import peft
import pytest
import torch

import hfplug
from hfplug import ConfigError, UnsupportedError
from hfplug.testing import models
from hfplug.tuners import (
    brier_score,
    expected_calibration_error,
    from_lora,
    negative_log_likelihood,
    ood_auroc,
    posterior,
    predictive,
    reliability_plot,
)


def ids(rows=2, length=8, seed=0):
    return torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def bayes(**options):
    chosen = {"r": 4, "target_modules": "all-linear", "train_size": 50, "sigma_init": 0.5, "init_lora_weights": False, **options}
    return peft.get_peft_model(models.tiny_llama(), hfplug.tuners.config(type="bayes_lora", **chosen))


# -- predictive ---------------------------------------------------------------------------------------------------------


def test_predictive_is_the_mean_over_samples_and_splits_the_entropy():
    model = bayes().train()
    model.base_model.model.model.layers[0].eval()  # a mode of its own must come back
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    found = predictive(model, {"input_ids": ids()}, samples=5)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    each = []
    for index in range(5):
        with posterior(model, index), torch.no_grad():
            each.append(model.eval()(input_ids=ids()).logits.double().softmax(-1))
    mean = torch.stack(each).mean(0)
    assert torch.allclose(found.mean_probabilities.double(), mean, atol=1e-6)
    entropy = torch.distributions.Categorical(probs=mean).entropy()
    expected = torch.stack([torch.distributions.Categorical(probs=p).entropy() for p in each]).mean(0)
    assert torch.allclose(found.predictive_entropy.double(), entropy, atol=1e-5)
    assert torch.allclose(found.mutual_information.double(), entropy - expected, atol=1e-5)
    assert bool((found.mutual_information >= 0).all())
    assert float(found.mutual_information.max()) > 1e-3
    later = predictive(model, {"input_ids": ids()}, samples=2, first_sample=3)
    assert torch.allclose(later.mean_probabilities.double(), torch.stack(each[3:]).mean(0), atol=1e-6)
    last = predictive(model, {"input_ids": ids()}, samples=5, last_token=True)
    assert torch.allclose(last.mean_probabilities, found.mean_probabilities[:, -1], atol=1e-7)


def test_one_sample_disagrees_with_nobody():
    found = predictive(bayes(), {"input_ids": ids()}, samples=1)
    assert bool((found.mutual_information == 0).all())


def test_what_predictive_and_posterior_refuse():
    with pytest.raises(ConfigError, match="samples=0"):
        predictive(bayes(), {"input_ids": ids()}, samples=0)
    with pytest.raises(ConfigError, match="no bayes_lora adapter"):
        predictive(models.tiny_llama(), {"input_ids": ids()})
    for wrong in (-1, True, "map", 1.5):
        with pytest.raises(ConfigError, match="sample="), posterior(bayes(), wrong):
            pass


@pytest.mark.parametrize("state", ["merged", "disabled", "another is active"])
def test_a_posterior_that_answers_alike_for_every_sample_is_refused(state):
    model = bayes(task_type="CAUSAL_LM")
    if state == "merged":
        model.merge_adapter()
    elif state == "disabled":
        model.base_model.disable_adapter_layers()
    else:
        model.add_adapter("b", hfplug.tuners.config(type="bayes_lora", r=4, target_modules=["q_proj"]))
        model.set_adapter("b")
    with pytest.raises(ConfigError, match=r"merged|disabled|not active"):
        predictive(model, {"input_ids": ids()})


def test_a_block_is_of_its_thread_and_ends_with_it():
    import copy
    from concurrent.futures import ThreadPoolExecutor

    model, batch = bayes(task_type="CAUSAL_LM").eval(), ids()

    def run(sample):
        with posterior(model, sample), torch.no_grad():
            return model(input_ids=batch).logits

    alone = [run(sample) for sample in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for sample, found in enumerate(pool.map(run, [i % 4 for i in range(32)])):
            assert torch.equal(found, alone[sample % 4])
    with torch.no_grad():
        mean = model(input_ids=batch).logits
        with posterior(model, 1):
            twin = copy.deepcopy(model)
            with pytest.raises(UnsupportedError, match="leave the posterior"):
                model.merge_adapter()
        assert torch.equal(twin(input_ids=batch).logits, mean)


def test_checkpointing_inside_a_block_is_refused():
    model = bayes(task_type="CAUSAL_LM").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(UnsupportedError, match="checkpointing"), posterior(model, 1):
        pass


def test_the_last_token_is_the_last_real_one():
    model, batch = bayes().eval(), ids()
    mask = torch.ones_like(batch)
    mask[0, 5:] = 0
    padded = predictive(model, {"input_ids": batch, "attention_mask": mask}, samples=2, last_token=True)
    alone = predictive(model, {"input_ids": batch[:1, :5]}, samples=2, last_token=True)
    assert torch.allclose(padded.mean_probabilities[0], alone.mean_probabilities[0], atol=1e-6)


def test_logits_that_exclude_a_class_and_heads_that_are_no_softmax():
    model = bayes().eval()
    head = model.get_base_model().lm_head
    head.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([7]), float("-inf")))
    found = predictive(model, {"input_ids": ids()}, samples=2)
    assert bool(torch.isfinite(found.mutual_information).all())
    model.config.problem_type = "regression"
    with pytest.raises(UnsupportedError, match="regression"):
        predictive(model, {"input_ids": ids()})


# -- metrics against their oracles --------------------------------------------------------------------------------------


def examples(n=400, classes=5):
    generator = torch.Generator().manual_seed(2)
    probabilities = (torch.randn(n, classes, generator=generator) * 2).softmax(-1)
    return probabilities, torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_is_torchmetrics(bins):
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities, labels = examples()
    oracle = multiclass_calibration_error(probabilities, labels, num_classes=5, n_bins=bins)
    assert expected_calibration_error(probabilities, labels, bins) == pytest.approx(float(oracle), abs=1e-6)
    certain = torch.eye(5)[labels]
    assert expected_calibration_error(certain, labels, bins) == 0.0


def test_likelihood_and_brier_are_sklearns():
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = examples()
    exact = probabilities.double() / probabilities.double().sum(1, keepdim=True)
    oracle = metrics.log_loss(labels.numpy(), exact.numpy())
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(oracle, rel=1e-6)
    oracle = metrics.brier_score_loss(labels.numpy(), exact.numpy(), scale_by_half=False)
    assert brier_score(probabilities, labels) == pytest.approx(oracle, rel=1e-6)


def test_auroc_is_torchmetrics_ties_included():
    from torchmetrics.functional.classification import binary_auroc

    generator = torch.Generator().manual_seed(4)
    low, high = torch.rand(50, generator=generator), torch.rand(70, generator=generator) + 0.2
    for scores in ((low, high), ((low * 5).round(), (high * 5).round())):
        target = torch.cat([torch.zeros(50), torch.ones(70)]).long()
        scaled = torch.cat(scores) / 10  # torchmetrics takes values outside [0, 1] for logits
        assert ood_auroc(*scores) == pytest.approx(float(binary_auroc(scaled, target)), abs=1e-6)
    assert ood_auroc(torch.zeros(3), torch.ones(2)) == 1.0
    assert ood_auroc(torch.zeros(3), torch.zeros(2)) == 0.5


def test_metrics_refuse_what_they_cannot_measure():
    probabilities, labels = examples()
    for metric in (expected_calibration_error, negative_log_likelihood, brier_score):
        for wrong in (
            (probabilities[0], labels), (probabilities, labels[:-1]), (probabilities, labels.float()),
            (probabilities, labels + 5), (probabilities[:0], labels[:0]), (probabilities.log(), labels),
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                metric(*wrong)
    with pytest.raises(ConfigError, match="bins=0"):
        expected_calibration_error(probabilities, labels, bins=0)
    with pytest.raises(ConfigError, match="both kinds"):
        ood_auroc(labels, labels[:0])
    with pytest.raises(ConfigError, match="finite"):
        ood_auroc(torch.tensor([float("nan")]), torch.ones(1))


def test_the_reliability_plot_shows_the_bins(tmp_path):
    pytest.importorskip("matplotlib")
    probabilities, labels = examples()
    figure = reliability_plot(probabilities, labels, tmp_path / "plot.png", bins=10)
    upper, lower = figure.axes
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert sum(bar.get_height() for bar in lower.patches) == pytest.approx(1)
    assert len(upper.patches) == sum(bar.get_height() > 0 for bar in lower.patches)
    assert "ECE" in upper.get_title()


# -- a trained LoRA -----------------------------------------------------------------------------------------------------


def lora(**options):
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    return peft.get_peft_model(models.tiny_llama(), config)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3, "v_proj": 5}},
     {"modules_to_save": ["lm_head"]}],
    ids=str,
)  # fmt: skip
def test_the_mean_is_the_lora(options, tmp_path):
    model = lora(**options).eval()
    with torch.no_grad():
        if "modules_to_save" in options:
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        expected = model(input_ids=ids()).logits
    made = from_lora(model, sigma=1e-3)
    with torch.no_grad():
        assert (made(input_ids=ids()).logits - expected).abs().max() <= 1e-5
        made.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(models.tiny_llama(), tmp_path).eval()
        assert torch.equal(again(input_ids=ids()).logits, made(input_ids=ids()).logits)
        with posterior(again, 3), posterior(made, 3):
            assert torch.equal(again(input_ids=ids()).logits, made(input_ids=ids()).logits)


def test_every_direction_is_disturbed_alike():
    """``sigma_i = sigma / D_i`` for ``B' = U·D``: the noise of ``B'Ã`` is isotropic in the column space, ``sigma`` everywhere."""
    made = from_lora(lora(), sigma=0.02)
    for _, layer in hfplug.tuners.tuner_layers(made, "bayes_lora"):
        b = layer.bayes_lora_B["default"].weight.detach().double()
        gram = b.T @ b
        assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-5 * gram.max()
        sigma = layer.bayes_lora_rho_A["default"].sigma().detach().double()
        assert torch.allclose(sigma * gram.diagonal().sqrt()[:, None], torch.full_like(sigma, 0.02), rtol=1e-3)


def test_directions_that_b_does_not_use_get_no_noise():
    made = from_lora(lora(rank_pattern={"q_proj": 2}), sigma=0.02)
    for name, layer in hfplug.tuners.tuner_layers(made, "bayes_lora"):
        sigma = layer.bayes_lora_rho_A["default"].sigma().detach()
        assert float(sigma.max()) < 10
        assert bool((sigma[2:] < 1e-20).all()) is ("q_proj" in name)


def test_masked_positions_do_not_count():
    from hfplug.tuners.bayes_lora.conversion import _changed

    made = from_lora(lora(), sigma=3.0)
    batch = {"input_ids": ids(), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    whole = _changed(made, [batch], 4)
    batch["attention_mask"][:, 1:] = 0
    first = _changed(made, [batch], 4)
    with torch.no_grad(), posterior(made, "mean"):
        mean = made(**batch).logits.argmax(-1)[:, 0]
    count = 0
    for sample in range(4):
        with torch.no_grad(), posterior(made, sample):
            count += int((made(**batch).logits.argmax(-1)[:, 0] != mean).sum())
    assert first == count / 8
    assert whole != first


def test_bisection_finds_the_largest_sigma_within_the_tolerance():
    anchors = [{"input_ids": ids(8, 8, seed)} for seed in range(2)]
    kept = from_lora(lora(), anchors, tolerance=0.05)
    sigma = float(layer_sigma(kept))

    def changed(model):
        total = count = 0
        for batch in anchors:
            with torch.no_grad(), posterior(model, "mean"):
                mean = model(**batch).logits.argmax(-1)
            for sample in range(4):
                with torch.no_grad(), posterior(model, sample):
                    total += int((model(**batch).logits.argmax(-1) != mean).sum())
                count += mean.numel()
        return total / count

    assert changed(kept) <= 0.05
    more = from_lora(lora(), sigma=sigma * 1.5)
    assert changed(more) > 0.05


def layer_sigma(model):
    _, layer = next(iter(hfplug.tuners.tuner_layers(model, "bayes_lora")))
    b = layer.bayes_lora_B["default"].weight.detach()
    return (layer.bayes_lora_rho_A["default"].sigma().detach()[0] * b.norm(dim=0)[0]).mean()


def test_what_from_lora_refuses_leaves_the_lora_alone():
    model = lora()
    with torch.no_grad():
        expected = model.eval()(input_ids=ids()).logits
    for wrong, match in (
        ({}, "either"), ({"sigma": 1.0, "anchors": [{}]}, "either"), ({"sigma": 0.0}, "sigma=0.0"), ({"anchors": []}, "empty"),
        ({"sigma": 1.0, "tolerance": 1.0}, "tolerance"), ({"sigma": 1.0, "adapter_name": "b"}, "'default'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            from_lora(model, **wrong)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids()).logits, expected)
    for wrong in ({"samples": 0}, {"iterations": 0}):
        with pytest.raises(ConfigError, match="integer >= 1"):
            from_lora(model, [{"input_ids": ids()}], **wrong)
    nothing = {"input_ids": ids(), "attention_mask": torch.zeros(2, 8, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="excludes every position"):
        from_lora(model, [nothing])
    with pytest.raises(ValueError, match="input_ids"):
        from_lora(model, [{"input_idz": ids()}])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids()).logits, expected)
    merged = lora()
    merged.merge_adapter()
    for refused in (lora(use_dora=True), lora(bias="all"), lora(trainable_token_indices=[3]), merged):
        with pytest.raises((UnsupportedError, ConfigError), match="from_lora"):
            from_lora(refused, sigma=1.0)
    untrained = peft.get_peft_model(models.tiny_llama(), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="never trained"):
        from_lora(untrained, [{"input_ids": ids()}])
    assert any("lora_A" in name for name, _ in untrained.named_parameters())
    with pytest.raises(UnsupportedError, match="IA3"):
        from_lora(peft.get_peft_model(models.tiny_llama(), peft.IA3Config(task_type="CAUSAL_LM")), sigma=1.0)
