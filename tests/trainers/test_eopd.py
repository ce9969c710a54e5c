"""EOPD: its contract, and the exact properties its card asks for."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div
from trainer_kit import TrainerContract, moves_alone, stir

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing import trainer_kits
from hfplug.testing.models import VOCAB, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_tokenizer
from hfplug.testing.trainer import TUNERS, furthest
from hfplug.trainers.eopd import reference
from hfplug.trainers.eopd.config import EOPDConfig
from hfplug.trainers.eopd.loss import eopd_parts, forward_kl, reverse_kl
from hfplug.trainers.tiles import Head, Wanted, tiles

N, H, HT, V = 29, 6, 9, 40


class TestEOPD(TrainerContract):
    method = "eopd"
    neutral = {"eopd_weight": 0.0}  # noqa: RUF012
    options = {"eopd_threshold": 0.5, "eopd_top_k": 4}  # noqa: RUF012


class _Tests(TrainerContract):
    """The kit alone, for the tests below."""

    method = "eopd"
    options = TestEOPD.options


KIT = _Tests()


# -- the loss -----------------------------------------------------------------------------------------------------------


def config(**options):
    return EOPDConfig("x", use_cpu=True, bf16=False, report_to=[], **options)


def problem(seed=0, sharp=True):
    """Student and teacher of 29 tokens; the teacher is sure of some and unsure of others."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias, target, teacher = (
        torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((N, H), (V, H), (V,), (N, HT), (V, HT))
    )
    if sharp:
        target *= torch.linspace(0.05, 3, N, dtype=torch.float64)[:, None]
    return hidden.requires_grad_(), Head(weight.requires_grad_(), bias.requires_grad_()), target, Head(teacher)


def loss_of(given, options, *, temperature=1.0, rows=1024, columns=32768, labels=None):
    made = config(**options)
    hidden, student, target, teacher = given
    found = tiles(hidden, student, target, teacher, Wanted("reverse", temperature, made.eopd_top_k, None, rows, columns), labels)
    parts = eopd_parts(found, made)
    return parts.reverse + made.eopd_weight * parts.forward, parts, found


def leaves(given):
    return given[0], given[1].weight, given[1].bias


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_against_the_reference_for_every_size_of_tile(renormalize, whole, temperature):
    given = problem()
    options = {"eopd_renormalize": renormalize, "eopd_full_vocabulary": whole, "eopd_top_k": 5, "eopd_weight": 0.7}
    z, zt = given[1].logits(given[0]), given[3].logits(given[2])
    expected = reference.eopd(
        z, zt, weight=0.7, top_k=5, renormalize_teacher=renormalize, student_full_vocabulary=whole, temperature=temperature
    ).sum()
    wanted = torch.autograd.grad(expected, leaves(given))
    for rows, columns in ((1, 40), (7, 11), (N, V)):
        loss, parts, _ = loss_of(given, options, temperature=temperature, rows=rows, columns=columns)
        assert 0 < int(parts.gated) < N
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad(loss, leaves(given)), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("off", [{"eopd_threshold": math.inf}, {"eopd_threshold": 100.0}, {"eopd_weight": 0.0}])
def test_without_the_gate_it_is_reverse_kl(off):
    given = problem()
    z, zt = given[1].logits(given[0]), given[3].logits(given[2])
    expected = kl_div(zt.log_softmax(-1), z.log_softmax(-1), reduction="sum", log_target=True)
    loss, *_ = loss_of(given, off)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(torch.autograd.grad(loss, leaves(given)), torch.autograd.grad(expected, leaves(given)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_all_gated_with_all_words_is_reverse_and_forward_kl(renormalize, whole):
    given = problem()
    log_q, log_p = given[1].logits(given[0]).log_softmax(-1), given[3].logits(given[2]).log_softmax(-1)
    expected = kl_div(log_p, log_q, reduction="sum", log_target=True) + kl_div(log_q, log_p, reduction="sum", log_target=True)
    options = {"eopd_threshold": -math.inf, "eopd_top_k": 1000, "eopd_renormalize": renormalize, "eopd_full_vocabulary": whole}
    loss, parts, _ = loss_of(given, options)
    assert int(parts.gated) == N
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


def test_a_renormalised_sum_is_never_negative_and_a_raw_one_has_its_own_bound():
    negative = 0
    for seed in range(20):
        _, _, target, teacher = problem(seed)  # the student: the teacher, somewhat surer of the same words
        student = Head(teacher.weight, None, 1.05)
        _, _, found = loss_of((target, student, target, teacher), {"eopd_top_k": 3})
        p, q = found.teacher_top.exp(), (found.top_logits - found.log_z[:, None]).exp()
        assert float(forward_kl(found).min()) >= 0
        # KL(p~||q~) - log Q, in the words of the paper
        inside = (p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True))
        parts = (inside[0] * (inside[0] / inside[1]).log()).sum(-1) - q.sum(-1).log()
        torch.testing.assert_close(forward_kl(found), parts, rtol=1e-9, atol=1e-12)
        raw = forward_kl(found, renormalize_teacher=False)
        assert bool((raw >= p.sum(-1) * (p.sum(-1) / q.sum(-1)).log() - 1e-12).all())
        negative += int((raw < 0).sum())
    assert negative  # so a clamp would have changed it


def test_ungated_tokens_get_nothing_from_the_forward_term():
    given = problem()
    _, parts, found = loss_of(given, {"eopd_threshold": 2.0})
    gated = found.teacher_entropy > 2.0
    assert 0 < int(gated.sum()) < N
    (of_hidden,) = torch.autograd.grad(parts.forward, given[0])
    assert float(of_hidden[~gated].abs().max()) == 0.0
    assert bool((of_hidden[gated].abs().sum(-1) > 0).all())


def test_a_sure_teacher_is_never_gated_and_a_uniform_one_by_the_size_of_the_vocabulary():
    hidden, student, _, _ = problem()
    sure, uniform = torch.zeros(N, HT, dtype=torch.float64), torch.zeros(N, HT, dtype=torch.float64)
    sure[:, 0] = 1
    teacher = Head(torch.zeros(V, HT, dtype=torch.float64))
    teacher.weight[3, 0] = 1000
    for target, threshold, gated in (
        (sure, 0.0, 0), (uniform, math.log(V) - 1e-9, N), (uniform, math.log(V) + 1e-9, 0)
    ):  # fmt: skip
        loss, parts, _ = loss_of((hidden, student, target, teacher), {"eopd_threshold": threshold})
        assert int(parts.gated) == gated
        assert bool(torch.isfinite(loss))


def test_the_gate_looks_at_the_teacher_at_temperature_one():
    given = problem()
    gates = [loss_of(given, {"eopd_threshold": 1.5}, temperature=t)[2].teacher_entropy for t in (0.5, 1.0, 2.0)]
    torch.testing.assert_close(gates[0], gates[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gates[2], gates[1], rtol=1e-10, atol=1e-10)
    p = np.exp(np.asarray(given[3].logits(given[2])))
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    np.testing.assert_allclose(np.asarray(gates[1].detach()), entropy, rtol=1e-10)
    for threshold in (0.5, 1.5, 2.5):
        assert int(loss_of(given, {"eopd_threshold": threshold})[1].gated) == int((entropy > threshold).sum())


def test_the_sampled_estimate_has_the_exact_mean_and_gradient():
    """Over all words, weighted by the student's probabilities: the expectation, without sampling."""
    given = problem()
    hidden, student, target, teacher = given
    exact, *_ = loss_of(given, {"eopd_weight": 0.0})
    wanted = torch.autograd.grad(exact, leaves(given))
    probabilities = student.logits(hidden).softmax(-1).detach()
    total = torch.zeros((), dtype=torch.float64)
    for word in range(V):
        found = tiles(hidden, student, target, teacher, Wanted("reverse"), torch.full((N,), word))
        total = total + (probabilities[:, word] * reverse_kl(found, sampled=True)).sum()
    torch.testing.assert_close(total, exact, rtol=1e-9, atol=1e-10)
    for a, b in zip(torch.autograd.grad(total, leaves(given)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_the_sampled_estimate_has_the_gradient_of_each_token_by_itself():
    """``-(log p - log q) d log q`` for the token that was sampled; its mean alone would allow a further ``d log q``."""
    from types import SimpleNamespace

    log_q = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    log_p = torch.tensor([-1.5, -0.2], dtype=torch.float64)
    found = SimpleNamespace(label_logit=log_q, log_z=torch.zeros(2, dtype=torch.float64), teacher_label=log_p)
    loss = reverse_kl(found, sampled=True)
    torch.testing.assert_close(loss, log_q - log_p)
    (slope,) = torch.autograd.grad(loss.sum(), log_q)
    torch.testing.assert_close(slope, (log_q - log_p).detach())


# -- the trainer --------------------------------------------------------------------------------------------------------


def test_b38_neutral_equals_stock_with_a_softcap_and_a_temperature():
    """On a family with a final softcap; at another temperature than 1; the teacher wider than the student."""

    def run(stock):
        model = tiny_gemma3(0, final_logit_softcapping=1.5)
        teacher = tiny_gemma3(1, hidden_size=48, final_logit_softcapping=2.0)
        extra = {} if stock else {"options": {"eopd_threshold": math.inf}}
        return KIT.train(stock=stock, model=model, arguments={"teacher_model": teacher}, temperature=1.3, **extra)

    ours, stock = run(False), run(True)
    KIT.assert_equal(ours, stock, own="eopd/")


def test_the_whole_vocabulary_with_every_token_gated_moves_by_both_divergences():
    """The trainer's gradient is that of the reference on the logits of its own completions."""
    trainer = KIT.build({"eopd_threshold": 1.0, "eopd_top_k": 5, "eopd_weight": 0.5})
    batch = a_batch(trainer)
    trainer.compute_loss(trainer.model, batch).backward()
    found = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    kept = batch["completion_ids"].shape[1]
    valid = batch["completion_mask"].bool()
    assert not bool(valid.all())  # some completion has ended early
    z, zt = (m(ids, attention_mask=mask).logits[:, -kept - 1 : -1][valid] for m in (trainer.model, trainer.teacher_model))
    loss = reference.eopd(z, zt.detach(), threshold=1.0, weight=0.5, top_k=5).sum() / valid.sum()
    loss.backward()
    assert furthest(found, {n: p.grad for n, p in trainer.model.named_parameters()}) <= 1e-6
    assert all(p.grad is None for p in trainer.teacher_model.parameters())


def a_batch(trainer):
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def test_what_a_tool_said_is_not_trained_on():
    """Tokens under ``tool_mask`` count for nothing, and the mask of the completion alone decides about the rest."""
    trainer = KIT.build()
    batch = a_batch(trainer)
    tool = torch.ones_like(batch["completion_mask"])
    tool[:, 1:3] = 0
    masked = {**batch, "tool_mask": tool, "num_items_in_batch": (batch["completion_mask"] * tool).sum().float()}
    # The same as a completion whose mask has those holes: the models see all tokens, the loss does not.
    losses = [float(trainer._compute_loss(trainer.model, b, n)[0].detach()) for b, n in ((masked, 10.0), (batch, 10.0))]
    _, _, count = trainer._compute_loss(trainer.model, masked, None)
    assert int(count) == int((batch["completion_mask"] * tool).sum()) < int(batch["completion_mask"].sum())
    assert losses[0] < losses[1] - 1e-3


def test_the_teacher_has_no_dropout_even_where_it_was_left_in_training_mode():
    teacher = tiny_gpt2(1, resid_pdrop=0.5, embd_pdrop=0.5).train()
    trainer = KIT.build(arguments={"teacher_model": teacher})
    batch = a_batch(trainer)
    teacher.train()
    losses = {float(trainer._compute_loss(trainer.model, batch, 10.0)[0].detach()) for _ in range(3)}
    assert len(losses) == 1


def test_b33_own_metrics_do_not_depend_on_the_cut():
    logs = [
        KIT.metrics(KIT.train(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=2))
        for size in (8, 2)
    ]
    for one, other in zip(*logs, strict=True):
        for name in ("gated_fraction", "teacher_entropy", "reverse_kl", "forward_kl"):
            assert one[f"eopd/{name}"] == pytest.approx(other[f"eopd/{name}"], abs=1e-6)
        assert one["loss"] == pytest.approx(
            one["eopd/reverse_kl"] + one["eopd/gated_fraction"] * one["eopd/forward_kl"], abs=1e-5
        )


def test_b39_a_student_that_is_its_teacher_starts_at_zero_and_the_teacher_stays():
    import peft

    teacher = peft.get_peft_model(
        tiny_llama(3), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    before = {n: t.clone() for n, t in teacher.state_dict().items()}
    student = copy.deepcopy(teacher)
    trainer = KIT.train({"eopd_weight": 0.0}, model=student, arguments={"teacher_model": teacher}, max_steps=3, learning_rate=0.5)
    logs = KIT.metrics(trainer)
    assert abs(logs[0]["eopd/reverse_kl"]) <= 1e-6
    assert all(bool((t == before[n]).all()) for n, t in teacher.state_dict().items())
    off = KIT.train({"eopd_weight": 0.0}, model=tiny_llama(0), arguments={"teacher_model": teacher})
    assert KIT.metrics(off)[0]["eopd/reverse_kl"] > 1e-3


def test_a_gated_mean_divides_by_the_gated_tokens():
    threshold = 4.152  # of the tiny teacher: some tokens above it, some not
    options = {"eopd_threshold": threshold, "eopd_weight": 0.5}
    both = [KIT.metrics(KIT.train({**options, "eopd_normalizer": n}))[0] for n in ("all", "gated")]
    for log, factor in zip(both, (both[0]["eopd/gated_fraction"], 1.0), strict=True):
        assert 0 < log["eopd/gated_fraction"] < 1
        assert log["loss"] == pytest.approx(log["eopd/reverse_kl"] + 0.5 * factor * log["eopd/forward_kl"], abs=1e-5)


def test_sampled_reverse_kl_trains():
    trainer = KIT.train({"eopd_reverse_kl": "sampled", "eopd_weight": 0.0})
    exact = KIT.train({"eopd_weight": 0.0})
    assert KIT.metrics(trainer)[0]["loss"] != pytest.approx(KIT.metrics(exact)[0]["loss"], abs=1e-4)
    assert furthest(*(t.hfplug_gradients[0] for t in (trainer, exact))) > 1e-5


def test_tiles_have_as_many_rows_as_asked_for(monkeypatch):
    import hfplug.trainers.eopd.trainer as module

    asked = []
    monkeypatch.setattr(module, "tiles", lambda *a: asked.append(a[4].rows) or tiles(*a))
    KIT.train({"eopd_chunk_size": 3})
    assert set(asked) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNERS)
def test_b39_adapters_are_in_the_loss_and_move_alone(name):
    """An adapter away from its first values: the loss is that of its own logits; two steps move nothing of the base."""
    trainer = KIT.build(arguments={"peft_config": KIT.tuner(name)}, max_steps=2, learning_rate=0.1)
    stir(trainer.model)
    batch = a_batch(trainer)
    trainer.model.eval()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    kept, valid = batch["completion_ids"].shape[1], batch["completion_mask"].bool()

    def by_hand():
        z, zt = (
            m(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -kept - 1 : -1][valid].detach()
            for m in (trainer.model, trainer.teacher_model)
        )
        return float(reference.eopd(z, zt, threshold=0.5, top_k=4).mean())

    loss = float(trainer._compute_loss(trainer.model, batch, None)[0].detach())
    assert loss == pytest.approx(by_hand(), abs=1e-5)
    with trainer.model.disable_adapter():
        assert abs(loss - by_hand()) > 1e-3
    moves_alone(trainer)


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eopd_weight": -1.0}, ConfigError, "eopd_weight=-1.0 must be finite and >= 0"),
        ({"eopd_top_k": 0}, ConfigError, "eopd_top_k=0 .* >= 1"),
        ({"eopd_chunk_size": 0}, ConfigError, "eopd_chunk_size=0"),
        ({"eopd_threshold": float("nan")}, ConfigError, "eopd_threshold=nan"),
        ({"eopd_normalizer": "gate"}, ConfigError, "eopd_normalizer='gate'.*did you mean 'gated'"),
        ({"beta": 0.5}, UnsupportedError, "beta=0.5 .*reverse KL"),
        ({"use_liger_kernel": True}, UnsupportedError, "use_liger_kernel=True"),
        ({"eopd_normalizer": "gated", "gradient_accumulation_steps": 2}, UnsupportedError, "gradient_accumulation_steps=2"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        config(**options)


def test_a_gated_mean_on_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(EOPDConfig, "world_size", property(lambda _: 2))
    with pytest.raises(UnsupportedError, match="eopd_normalizer='gated' on 2 processes"):
        KIT.build({"eopd_normalizer": "gated"})


def test_a_wrong_teacher_is_refused_by_name():
    arguments = {"processing_class": tiny_tokenizer(), "args": config()}
    from hfplug.trainers import EOPDTrainer

    with pytest.raises(ConfigError, match="EOPDTrainer needs a teacher"):
        EOPDTrainer(tiny_llama(), **arguments)
    with pytest.raises(ConfigError, match=f"vocab_size 80, the student LlamaForCausalLM has {VOCAB}"):
        EOPDTrainer(tiny_llama(), tiny_llama(vocab_size=80), **arguments)


def test_a_teacher_that_is_the_student_is_refused():
    """Its adapters would be the student's: it would change as the student learns."""
    import peft

    base = tiny_llama()
    student = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"shares \d+ parameters with the student"):
        KIT.build(model=student, arguments={"teacher_model": base})


def test_an_adapter_on_the_teachers_head_is_refused():
    import peft

    teacher = peft.get_peft_model(tiny_llama(3), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UnsupportedError, match="teacher_model has an adapter on its output embeddings"):
        KIT.build(arguments={"teacher_model": teacher})
    assert trainer_kits.arguments("distill")["teacher_model"] is not None
