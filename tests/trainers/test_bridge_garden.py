"""Bridge-Garden: its contract, and the exact properties its card asks for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from trainer_kit import TrainerContract, moves_alone, stir

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing.models import VOCAB, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_tokenizer
from hfplug.testing.trainer import TUNERS, furthest
from hfplug.trainers.bridge_garden import reference
from hfplug.trainers.bridge_garden.config import BridgeGardenConfig
from hfplug.trainers.bridge_garden.loss import deltas, hybrid_loss, soft_weight
from hfplug.trainers.tiles import Head, Wanted, tiles

VARIANTS = ("static", "confidence", "label_confidence", "entropy", "power_entropy", "curriculum", "risk")
N, H, HT, V = 19, 6, 9, 40


class Kit(TrainerContract):
    method = "bridge_garden"
    options = {"garden_variant": "risk", "garden_soft_weight": 0.3}  # noqa: RUF012

    def arguments(self):
        return {**super().arguments(), "teacher_model": tiny_llama(7)}

    def build(self, options=None, *, stock=False, arguments=None, **settings):
        """The stock trainer of the task takes no teacher."""
        if not stock:
            return super().build(options, arguments=arguments, **settings)
        return _Stock().build(options, stock=True, arguments=arguments, **settings)


class _Stock(TrainerContract):
    method = "bridge_garden"


class TestBridgeGarden(Kit):
    neutral = {"garden_variant": "static", "garden_soft_weight": 0.0}  # noqa: RUF012


KIT = Kit()


def config(**options):
    return BridgeGardenConfig("x", use_cpu=True, bf16=False, report_to=[], **options)


# -- lambda -------------------------------------------------------------------------------------------------------------


def teacher_tiles(logits, labels=None, power=0.5):
    """Tiles of a teacher with given logits ``(N, V)``, in the least roundabout way: a head of its own words."""
    logits = logits.double()
    n, v = logits.shape
    labels = torch.zeros(n, dtype=torch.long) if labels is None else labels
    one = torch.eye(v, dtype=torch.float64)
    return tiles(
        torch.zeros(n, v, dtype=torch.float64), Head(one), logits, Head(one), Wanted("forward", top=1, power=power), labels
    )


def weights(logits, variant, labels=None, power=0.5, step=3, steps=10, **options):
    made = config(garden_variant=variant, garden_power=power, **options)
    return soft_weight(teacher_tiles(logits, labels, power), made, logits.shape[1], step, steps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lambda_against_the_reference_and_in_its_range(variant):
    draw = torch.Generator().manual_seed(0)
    for sharp in (0.01, 1.0, 5.0, 50.0):
        logits = sharp * torch.randn(30, V, generator=draw, dtype=torch.float64)
        labels = torch.randint(0, V, (30,), generator=draw)
        found = weights(logits, variant, labels, garden_soft_weight=0.4, garden_warmup=0.5)
        expected = [
            reference.soft_weight(row, int(y), variant, fixed=0.4, power=0.5, progress=3 / 5)
            for row, y in zip(logits, labels, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
        assert 0 <= float(found.min()) <= float(found.max()) <= 1
        assert not found.requires_grad


def test_lambda_of_a_uniform_and_of_a_sure_teacher():
    uniform, sure = torch.zeros(3, V), torch.zeros(3, V)
    sure[:, 5] = 1e4
    five, other = torch.full((3,), 5), torch.full((3,), 6)
    for variant, expected in (
        ("entropy", 1.0),
        ("power_entropy", 1.0),
        ("confidence", 1 - 1 / V),
        ("label_confidence", 1 - 1 / V),
    ):
        torch.testing.assert_close(weights(uniform, variant, five), torch.full((3,), expected, dtype=torch.float64))
        assert float(weights(sure, variant, five).abs().max()) == 0.0
    # The two confidences part where the label is not what the teacher says: there the code's is all soft.
    assert float(weights(sure, "label_confidence", other).min()) == 1.0
    assert float(weights(sure, "confidence", other).max()) == 0.0


def test_lambda_leaves_its_range_by_no_rounding():
    found = SimpleNamespace(teacher_entropy=torch.tensor([math.log(V) + 1e-4, -1e-6]))
    assert soft_weight(found, config(garden_variant="entropy"), V, 0, 1).tolist() == [1.0, 0.0]


def test_the_power_sum_has_the_entropy_as_its_limit():
    logits = torch.randn(30, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    entropy = weights(logits, "entropy")
    torch.testing.assert_close(weights(logits, "power_entropy", power=1.0), entropy, rtol=0, atol=0)
    for power in (1 - 1e-4, 1 + 1e-4):
        torch.testing.assert_close(weights(logits, "power_entropy", power=power), entropy, rtol=0, atol=1e-3)
    assert float((weights(logits, "power_entropy", power=0.1) - entropy).abs().max()) > 0.05


def test_the_curriculum_goes_from_hard_to_its_weight():
    logits = torch.zeros(1, V)
    options = {"garden_soft_weight": 0.8, "garden_warmup": 0.25}
    for step, expected in ((0, 0.0), (5, 0.4), (10, 0.8), (40, 0.8)):
        assert float(weights(logits, "curriculum", step=step, steps=40, **options)) == pytest.approx(expected)
    assert float(weights(logits, "curriculum", step=0, steps=40, garden_soft_weight=0.8, garden_warmup=0.0)) == pytest.approx(0.8)


# -- the loss -----------------------------------------------------------------------------------------------------------


def problem(seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias, target, teacher = (
        torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((N, H), (V, H), (V,), (N, HT), (V, HT))
    )
    labels = torch.randint(0, V, (N,), generator=draw)
    return hidden.requires_grad_(), Head(weight.requires_grad_(), bias.requires_grad_()), target, Head(teacher), labels


def loss_of(given, variant, followed=None, *, rows=1024, columns=32768, **options):
    hidden, student, target, teacher, labels = given
    made = config(garden_variant=variant, **options)
    found = tiles(hidden, student, target, teacher, Wanted("forward", 1.0, 1, made.garden_power, rows, columns), labels)
    followed = torch.arange(N) < N - 1 if followed is None else followed
    return hybrid_loss(found, soft_weight(found, made, V, 3, 10), made, followed)[0].sum()


def leaves(given):
    return given[0], given[1].weight, given[1].bias


def parts(given):
    z, zt = given[1].logits(given[0]), given[3].logits(given[2])
    soft = kl_div(z.log_softmax(-1), zt.log_softmax(-1), reduction="sum", log_target=True)
    return cross_entropy(z, given[4], reduction="sum"), soft


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_the_reference_for_every_size_of_tile(variant):
    given = problem()
    z, zt = given[1].logits(given[0]), given[3].logits(given[2]).detach()
    options = {"garden_soft_weight": 0.4, "garden_risk_weight": 0.2, "garden_warmup": 0.5}
    expected = reference.hybrid(z[None], zt[None], given[4][None], variant, risk_weight=0.2, fixed=0.4, power=0.5, progress=3 / 5)
    wanted = torch.autograd.grad(expected, leaves(given))
    for rows, columns in ((1, 40), (7, 11), (N, V)):
        loss = loss_of(given, variant, rows=rows, columns=columns, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad(loss, leaves(given)), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_static_is_cross_entropy_at_0_forward_kl_at_1_and_linear_between():
    given = problem()
    hard, soft = parts(given)
    for weight in (0.0, 0.25, 0.7, 1.0):
        loss, expected = loss_of(given, "static", garden_soft_weight=weight), (1 - weight) * hard + weight * soft
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        for a, b in zip(
            torch.autograd.grad(loss, leaves(given)),
            torch.autograd.grad(expected, leaves(given), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "risk"])
def test_a_teacher_sure_of_the_label_makes_every_variant_cross_entropy(variant):
    hidden, student, _, _, labels = problem()
    teacher = Head(torch.eye(V, dtype=torch.float64))
    sure = 1e4 * torch.nn.functional.one_hot(labels, V).double()
    hard, _ = parts((hidden, student, sure, teacher, labels))
    torch.testing.assert_close(loss_of((hidden, student, sure, teacher, labels), variant), hard, rtol=1e-10, atol=1e-10)


def test_risk_without_its_weight_is_static():
    given = problem()
    found, expected = (loss_of(given, v, garden_soft_weight=0.3, garden_risk_weight=0.0) for v in ("risk", "static"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for a, b in zip(torch.autograd.grad(found, leaves(given)), torch.autograd.grad(expected, leaves(given)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_gradient_of_the_risk_term_by_hand_on_three_tokens():
    """d Δ_t / d f_t = -onehot(y_t), d Δ_t / d f_{t+1} = softmax(f_{t+1}); the last token has none."""
    draw = torch.Generator().manual_seed(2)
    f = torch.randn(3, V, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, 8, 1])
    head = Head(torch.eye(V, dtype=torch.float64))
    found = tiles(f, head, torch.zeros(3, V, dtype=torch.float64), head, Wanted("forward", top=1), labels)
    delta = deltas(found, torch.tensor([True, True, False]))
    assert float(delta[2]) == 0.0
    alpha = 0.2
    (grad,) = torch.autograd.grad((alpha / 4 * delta.square()).sum(), f)
    soft, hot = f.softmax(-1).detach(), torch.nn.functional.one_hot(labels, V).double()
    d = delta.detach()
    by_hand = alpha / 2 * torch.stack([-d[0] * hot[0], d[0] * soft[1] - d[1] * hot[1], d[1] * soft[2]])
    torch.testing.assert_close(grad, by_hand, rtol=1e-10, atol=1e-12)


def test_no_token_has_no_delta():
    empty = torch.zeros(0, dtype=torch.float64)
    found = SimpleNamespace(log_z=empty, label_logit=empty)
    assert deltas(found, torch.zeros(0, dtype=torch.bool)).shape == (0,)


# -- the trainer --------------------------------------------------------------------------------------------------------


def test_all_soft_is_gkd_with_beta_0():
    """On TRL's own generalized JSD of full logits: the same loss and gradient."""
    from trl.experimental.gkd import GKDTrainer

    trainer = KIT.build({"garden_variant": "static", "garden_soft_weight": 1.0})
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    given = {k: v for k, v in batch.items() if k != "labels"}
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    found = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    z, zt = (m(**given).logits[:, :-1] for m in (trainer.model, trainer.teacher_model))
    expected = GKDTrainer.generalized_jsd_loss(z, zt.detach(), batch["labels"][:, 1:], beta=0.0)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert furthest(found, {n: p.grad for n, p in trainer.model.named_parameters()}) <= 1e-6
    assert all(p.grad is None for p in trainer.teacher_model.parameters())


def test_b38_neutral_equals_stock_with_a_softcap():
    model, teacher = (tiny_gemma3(s, final_logit_softcapping=1.5, hidden_size=h) for s, h in ((0, 32), (1, 48)))
    import copy

    ours = KIT.train({"garden_variant": "static", "garden_soft_weight": 0.0}, model=copy.deepcopy(model),
                     arguments={"teacher_model": teacher})  # fmt: skip
    KIT.assert_equal(ours, KIT.train(stock=True, model=model), own="bridge_garden/")


@pytest.mark.parametrize("variant", VARIANTS)
def test_b35_one_denominator_for_both_parts(variant):
    """The authors' code divides the soft part by the micro-batch's own count: it is then as many times too heavy."""
    options = {"garden_variant": variant, "garden_soft_weight": 0.6}
    whole = KIT.train(options)
    parts = KIT.train(options, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert furthest(whole.hfplug_gradients[0], parts.hfplug_gradients[0]) <= 1e-6
    logs = [KIT.metrics(t)[0] for t in (whole, parts)]
    assert logs[0].keys() == logs[1].keys()
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)
    named = {k.removeprefix("bridge_garden/"): v for k, v in logs[0].items() if "/" in k}
    assert {"soft_weight", "soft_loss", "hard_loss"} <= named.keys()
    if variant == "static":
        assert logs[0]["loss"] == pytest.approx(0.6 * named["soft_loss"] + 0.4 * named["hard_loss"], abs=1e-5)


def test_unlabelled_tokens_and_padding_count_for_nothing():
    """The prompt's labels are -100; what stands in the padding changes nothing."""
    trainer = KIT.build()
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    assert bool((batch["labels"] == -100).any())
    padding = batch["attention_mask"] == 0
    assert bool(padding.any())
    losses = []
    for fill in (0, 9):
        given = {**batch, "input_ids": batch["input_ids"].masked_fill(padding, fill)}
        losses.append(float(trainer.compute_loss(trainer.model, given).detach()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("variant", ["entropy", "risk"])
def test_packed_documents_are_apart(variant):
    """Rows packed into one, and rows one by one: the same gradient; for risk no Δ reaches into the next document."""
    options = {"garden_variant": variant, "garden_risk_weight": 1.0}
    apart = KIT.train(options)
    flat = KIT.train(options, padding_free=True, max_length=None)
    assert furthest(apart.hfplug_gradients[0], flat.hfplug_gradients[0]) <= 1e-6


def test_the_curriculum_is_where_it_was_after_a_restart(tmp_path):
    options = {"garden_variant": "curriculum", "garden_soft_weight": 0.8, "garden_warmup": 1.0}
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = KIT.train(options, output_dir=tmp_path / "a", **args)
    resumed = KIT.build(options, output_dir=tmp_path / "b", **args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    found = [[e["bridge_garden/soft_weight"] for e in KIT.metrics(t)] for t in (straight, resumed)]
    assert found[0] == found[1] == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_the_teacher_has_no_dropout_even_where_it_was_left_in_training_mode():
    teacher = tiny_gpt2(1, resid_pdrop=0.5, embd_pdrop=0.5).train()
    trainer = KIT.build(arguments={"teacher_model": teacher})
    batch = next(iter(trainer.get_train_dataloader()))
    teacher.train()
    losses = {float(trainer.compute_loss(trainer.model, dict(batch)).detach()) for _ in range(3)}
    assert len(losses) == 1


def test_b36_an_argument_that_is_not_known_is_refused_by_name():
    trainer = KIT.build()
    with pytest.raises(UnsupportedError, match=r"compute_loss got \['weights'\]"):
        trainer.compute_loss(trainer.model, {}, weights=1)


def test_a_window_without_labels_is_a_differentiable_zero():
    """As TRL's trainer has it; 0 / 0 would make every weight NaN."""
    trainer = KIT.build()
    batch = next(iter(trainer.get_train_dataloader()))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for items in (None, 0, torch.tensor(0)):
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items)
        loss.backward()
        assert float(loss.detach()) == 0.0
    assert all(bool((p.grad == 0).all()) for p in trainer.model.parameters() if p.grad is not None)


def test_tiles_have_as_many_rows_as_asked_for(monkeypatch):
    import hfplug.trainers.bridge_garden.trainer as module

    asked = []
    monkeypatch.setattr(module, "tiles", lambda *a: asked.append((a[4].rows, a[4].power)) or tiles(*a))
    KIT.train({"garden_chunk_size": 3, "garden_variant": "power_entropy", "garden_power": 0.3})
    assert set(asked) == {(3, 0.3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNERS)
def test_b39_adapters_are_in_the_loss_and_move_alone(name):
    """An adapter away from its first values: the loss is that of its own logits; two steps move nothing of the base."""
    options = {"garden_variant": "static", "garden_soft_weight": 0.5}
    trainer = KIT.build(options, arguments={"peft_config": KIT.tuner(name)}, max_steps=2, learning_rate=0.1)
    stir(trainer.model)
    trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    given = {k: v for k, v in batch.items() if k != "labels"}
    labels = batch["labels"][:, 1:]

    def by_hand():
        z, zt = (
            m(**given, use_cache=False).logits[:, :-1][labels != -100].detach() for m in (trainer.model, trainer.teacher_model)
        )
        soft = kl_div(z.log_softmax(-1), zt.log_softmax(-1), reduction="batchmean", log_target=True)
        return float(0.5 * soft + 0.5 * cross_entropy(z, labels[labels != -100]))

    loss = float(trainer.compute_loss(trainer.model, dict(batch)).detach())
    assert loss == pytest.approx(by_hand(), abs=1e-5)
    with trainer.model.disable_adapter():
        assert abs(loss - by_hand()) > 1e-4
    moves_alone(trainer)


def test_checkpointing_changes_nothing():
    off, on = KIT.train(), KIT.train(activation_checkpointing=True)
    assert furthest(off.hfplug_gradients[0], on.hfplug_gradients[0]) <= 1e-6


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"garden_soft_weight": 1.5}, ConfigError, "garden_soft_weight=1.5 .*<= 1"),
        ({"garden_variant": "entropi"}, ConfigError, "garden_variant='entropi'.*did you mean 'entropy'"),
        ({"garden_power": 0.0}, ConfigError, "garden_power=0.0"),
        ({"garden_warmup": -0.1}, ConfigError, "garden_warmup=-0.1"),
        ({"garden_risk_weight": float("inf")}, ConfigError, "garden_risk_weight=inf"),
        ({"garden_chunk_size": 0}, ConfigError, "garden_chunk_size=0"),
        ({"teacher_model_init_kwargs": "dtype"}, ConfigError, "teacher_model_init_kwargs='dtype'"),
        ({"use_liger_kernel": True}, UnsupportedError, "use_liger_kernel=True"),
        ({"loss_type": "dft"}, UnsupportedError, "loss_type='dft'"),
        ({"label_smoothing_factor": 0.1}, UnsupportedError, "label_smoothing_factor=0.1"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        config(**options)


def test_a_wrong_teacher_is_refused_by_name():
    with pytest.raises(ConfigError, match="BridgeGardenTrainer needs a teacher"):
        KIT.build(arguments={"teacher_model": None})
    with pytest.raises(ConfigError, match=f"vocab_size 80, the student LlamaForCausalLM has {VOCAB}"):
        KIT.build(arguments={"teacher_model": tiny_llama(vocab_size=80)})
    with pytest.raises(ConfigError, match="are for loading, but teacher_model is the loaded LlamaForCausalLM"):
        KIT.build({"teacher_model_init_kwargs": {"dtype": "float32"}})
    with pytest.raises(UnsupportedError, match="compute_loss_func"):
        KIT.build(arguments={"compute_loss_func": lambda *_, **__: 0})
    model = tiny_llama()
    with pytest.raises(ConfigError, match="shares"):
        KIT.build(model=model, arguments={"teacher_model": model})


def test_a_teacher_that_is_unlike_what_its_configuration_says_is_refused(tmp_path):
    padded = tiny_llama(7)
    padded.lm_head = torch.nn.Linear(32, VOCAB + 8, bias=False)
    with pytest.raises(ConfigError, match=rf"teacher_model=LlamaForCausalLM has {VOCAB + 8} rows.*{VOCAB}: their distributions"):
        KIT.build(arguments={"teacher_model": padded})
    doubled = tiny_llama(7)
    doubled.lm_head.register_forward_hook(lambda _module, _args, out: 2 * out)
    with pytest.raises(UnsupportedError, match=r"teacher_model \(LlamaForCausalLM\) does more between"):
        KIT.build(arguments={"teacher_model": doubled})
    tiny_llama(7).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    swapped = text.replace('"w7"', '"w?"').replace('"w9"', '"w7"').replace('"w?"', '"w9"')
    (tmp_path / "tokenizer.json").write_text(swapped)
    with pytest.raises(ConfigError, match="another vocabulary of the same size: 2 ids"):
        KIT.build(arguments={"teacher_model": str(tmp_path)})


def test_a_count_over_all_ranks_meets_the_mean_of_gradients(monkeypatch):
    """``num_items_in_batch`` counts the tokens of every rank and DDP averages gradients, so a loss counts once per rank."""
    trainer = KIT.build()
    batch = next(iter(trainer.get_train_dataloader()))
    alone = float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=20).detach())
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 2))
    both = float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=20).detach())
    assert both == pytest.approx(2 * alone, rel=1e-6)
    unknown = [float(trainer.compute_loss(trainer.model, dict(batch)).detach())]
    monkeypatch.undo()
    assert unknown == [float(trainer.compute_loss(trainer.model, dict(batch)).detach())]


def test_a_teacher_from_a_folder(tmp_path):
    tiny_llama(7).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    found = KIT.train({**KIT.options, "teacher_model_name_or_path": str(tmp_path / "teacher")}, arguments={"teacher_model": None})
    assert furthest(found.hfplug_gradients[0], KIT.train().hfplug_gradients[0]) == 0.0
    assert math.isfinite(KIT.metrics(found)[0]["bridge_garden/abs_delta"])


def test_a_mixture_of_experts_is_refused_until_its_own_loss_is_switched_off():
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"router_aux_loss_coef=0.5: .* set router_aux_loss_coef=0.0"):
        KIT.build(model=MixtralForCausalLM(shape))
    assert math.isfinite(KIT.metrics(KIT.train(model=MixtralForCausalLM(shape), router_aux_loss_coef=0.0))[0]["loss"])


def test_prompt_learning_is_refused():
    import peft

    learning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match="the student has the prompt-learning adapter 'default'"):
        KIT.build(arguments={"peft_config": learning})
