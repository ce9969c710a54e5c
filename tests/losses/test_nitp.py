"""NITP: its contract, the formula against the written-out reference, and what its card asks for."""

from __future__ import annotations

import datasets
import peft
import pytest
import torch
from torch import nn

import hfplug.losses
from hfplug.calls import Call
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.losses.nitp import reference
from hfplug.losses.nitp.config import NITPConfig
from hfplug.losses.nitp.loss import NITPLoss, SwiGLUProjector, cosine_distance
from hfplug.positions import batch_pairs, decoder_layers, token_pairs
from hfplug.testing.loss import LossContract, one_step
from hfplug.testing.models import TINY_MODELS, VOCAB, PadTo, tiny_llama, tiny_lm_dataset, tiny_trainer


class TestNITP(LossContract):
    method = "nitp"


class _AllPairs(LossContract):
    method = "nitp"
    options = {"pairs": "all"}  # noqa: RUF012


@pytest.mark.parametrize("sft", [False, True])
def test_all_pairs_are_normalised_by_their_own_count(sft):
    _AllPairs().test_b35_accumulation(sft)


def test_all_pairs_under_padding_and_packing():
    _AllPairs().test_b33_padding()
    _AllPairs().test_packing_equals_separate()


# -- the formula --------------------------------------------------------------------------------------------------------


def batch(seed, dtype=torch.float64):
    """Hidden states of 3 x 9 tokens, and a padded, partly labelled, partly packed batch."""
    draw = torch.Generator().manual_seed(seed)
    last, early = (torch.randn(3, 9, 6, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    labels = torch.randint(0, 5, (3, 9), generator=draw)
    labels[torch.rand(3, 9, generator=draw) < 0.3] = -100
    mask, positions = torch.ones(3, 9, dtype=torch.long), torch.arange(9).repeat(3, 1)
    mask[0, :3] = 0  # left padding
    mask[1, 6:] = 0  # right padding
    positions[2] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1])  # three documents
    inputs = {"input_ids": torch.randint(0, 5, (3, 9), generator=draw), "labels": labels}
    return last, early, {**inputs, "attention_mask": mask, "position_ids": positions}


def compute(last, early, inputs, projector, **options):
    term = NITPLoss(NITPConfig(**options))
    term.projector = projector
    call = Call(dict(inputs), training=True)
    call.memo.update({("nitp", "last"): last, ("nitp", "early"): early})
    return term, term.compute(inputs, call)


@pytest.mark.parametrize("pairs", ["labels", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_against_the_reference(pairs, seed):
    last, early, inputs = batch(seed)
    torch.manual_seed(seed)
    projector = SwiGLUProjector(6).double()
    term, found = compute(last, early, inputs, projector, pairs=pairs)
    weights = [getattr(projector, name).weight.tolist() for name in ("gate", "up", "down")]
    total, count = reference.nitp(
        last.tolist(), early.tolist(), lambda h: reference.swiglu(*weights, h),
        labels=inputs["labels"].tolist() if pairs == "labels" else None,
        attention_mask=inputs["attention_mask"].tolist(), position_ids=inputs["position_ids"].tolist(),
    )  # fmt: skip
    assert int(found.count) == count == int(term.support(inputs))
    assert 0 < count < 20
    assert found.total.item() == pytest.approx(total, rel=1e-12)
    _, single = compute(last.float(), early.float(), inputs, projector.float(), pairs=pairs)
    assert single.total.item() == pytest.approx(total, rel=1e-6)


def test_shift():
    """z_{t+1} = P(h_t) gives 0; the same vectors at the same position do not."""
    last, _, inputs = batch(0)
    early = torch.roll(last, 1, dims=1)
    assert compute(last, early, inputs, nn.Identity())[1].total.item() == pytest.approx(0, abs=1e-12)
    same_position = compute(last, last, inputs, nn.Identity())[1]
    assert same_position.total.item() > 0.1 * same_position.count.item()


def test_range_scale_and_direction():
    p, z = torch.randn(50, 8, dtype=torch.float64, requires_grad=True), torch.randn(50, 8, dtype=torch.float64)
    loss = cosine_distance(p, z, 1e-6)
    assert ((loss >= 0) & (loss <= 2)).all()
    assert cosine_distance(-z, z, 1e-6).allclose(torch.tensor(2.0, dtype=torch.float64))
    assert cosine_distance(3.7 * p, 0.2 * z, 1e-6).allclose(loss)
    (grad,) = torch.autograd.grad(loss.sum(), p)
    assert (grad * p).sum(-1).abs().max() < 1e-14
    (scaled,) = torch.autograd.grad(cosine_distance(3.7 * p, z, 1e-6).sum(), p)
    assert nn.functional.cosine_similarity(grad, scaled).allclose(torch.ones(50, dtype=torch.float64))


def test_zero_vectors_are_finite():
    p = torch.zeros(3, 4, requires_grad=True)
    loss = cosine_distance(p, torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]]), 1e-6)
    assert loss.tolist() == [1, 1, 1]
    loss.sum().backward()
    assert p.grad.isfinite().all()


def test_no_pair_at_all_is_a_zero_with_a_graph():
    last, early, inputs = batch(1, torch.float32)
    inputs["labels"][:] = -100
    projector = SwiGLUProjector(6)
    _, found = compute(last.requires_grad_(True), early, inputs, projector)
    assert found.total.item() == 0
    assert found.count.item() == 0
    found.total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in projector.parameters())


def test_cosine_is_taken_in_fp32_under_bf16_autocast():
    last, early, inputs = batch(2, torch.float32)
    projector = SwiGLUProjector(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = projector(last)
        _, found = compute(last, early, inputs, projector)
    assert seen.dtype == torch.bfloat16
    assert found.total.dtype == torch.float32
    keep = token_pairs(Call(dict(inputs), training=True), inputs, "labels")
    exact = 1 - nn.functional.cosine_similarity(seen[:, :-1][keep].double(), early[:, 1:][keep].double(), dim=-1)
    assert found.total.item() == pytest.approx(exact.sum().item(), rel=1e-6)


def test_a_bf16_model_without_autocast():
    trainer = tiny_trainer(tiny_llama().bfloat16(), **one_step())
    hfplug.losses.add(trainer, "nitp")
    trainer.train()
    assert 0.5 < trainer.state.log_history[0]["nitp/loss"] < 1.5
    assert trainer.state.log_history[0]["grad_norm"] > 0


# -- in a model ---------------------------------------------------------------------------------------------------------


def attached(model, **options):
    trainer = tiny_trainer(model)
    return trainer, hfplug.losses.add(trainer, "nitp", **options)


def term_of(trainer, inputs):
    """The term alone: the difference of compute_loss with and without it."""
    wrapped = trainer.compute_loss(trainer.model, dict(inputs))
    return wrapped - type(trainer).compute_loss(trainer, trainer.model, dict(inputs))


@pytest.mark.parametrize(("family", "layer"), [*((name, None) for name in TINY_MODELS), ("llama", 3)])
def test_capture_equals_output_hidden_states(family, layer):
    model = TINY_MODELS[family](**({} if layer is None else {"num_hidden_layers": 5}))
    trainer, handle = attached(model, layer=layer)
    inputs = PadTo(12)(list(tiny_lm_dataset(4, longest=12)))
    found = term_of(trainer, inputs)
    states = model.base_model(inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
    last, early = states.last_hidden_state, states.hidden_states[layer or 1]
    keep = inputs["labels"][:, 1:] != -100
    predicted = handle.auxiliary(last[:, :-1][keep])
    expected = (1 - nn.functional.cosine_similarity(predicted, early[:, 1:][keep].detach(), dim=-1)).mean()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    gradients = [torch.autograd.grad(v, list(model.base_model.parameters()), allow_unused=True) for v in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours - theirs).abs().max() <= 1e-6


def test_stopped_gradient():
    """With h detached no layer has a gradient: the early layers get theirs through h alone."""
    model = tiny_llama(num_hidden_layers=4)
    trainer, handle = attached(model)
    inputs = PadTo()(list(tiny_lm_dataset(4)))
    term_of(trainer, inputs).backward()
    through_h = {n: p.grad.clone() for n, p in model.model.named_parameters()}
    assert all(g.any() for g in through_h.values())
    handle.undo()
    model.zero_grad()
    trainer, handle = attached(model)
    stock = NITPLoss.captured

    def detached(self, call, key):
        return stock(self, call, key).detach()

    handle.term.captured = detached.__get__(handle.term)
    wrapped = term_of(trainer, inputs)
    wrapped.backward()
    assert not any(p.grad is not None and p.grad.abs().max() > 1e-7 for p in model.model.parameters())
    assert all(p.grad.any() for p in handle.auxiliary.parameters())


def test_default_layer_is_a_fifth_of_the_depth():
    for depth, k in ((1, 1), (2, 1), (6, 1), (16, 3), (24, 5), (28, 6), (30, 6)):
        model = tiny_llama(num_hidden_layers=depth)
        before = [len(layer._forward_hooks) for layer in model.model.layers]
        attached(model)
        hooked = [i for i, layer in enumerate(model.model.layers) if len(layer._forward_hooks) > before[i]]
        assert hooked == [k - 1]


def test_content_of_padding_and_of_other_documents_does_not_matter():
    model = tiny_llama()
    trainer, _ = attached(model, pairs="all")
    rows = list(tiny_lm_dataset(3, shortest=4, longest=10))
    for side in ("right", "left"):
        inputs = PadTo(16, side)(rows)
        other = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 7)}
        assert not torch.equal(inputs["input_ids"], other["input_ids"])
        assert term_of(trainer, other).item() == pytest.approx(term_of(trainer, inputs).item(), abs=1e-6)
    first, second = rows[0]["input_ids"], rows[1]["input_ids"]
    positions = torch.tensor([[*range(len(first)), *range(len(second))]])
    packed = [term_of(trainer, {"input_ids": torch.tensor([ids]), "position_ids": positions, "labels": torch.tensor([ids])})
              for ids in (first + second, [*first[::-1], *second])]  # fmt: skip
    alone = [term_of(trainer, PadTo()([{"input_ids": ids, "labels": ids}])) for ids in (first, first[::-1], second)]
    sizes = len(first) - 1, len(second) - 1
    for whole, start in zip(packed, alone[:2], strict=True):
        assert whole.item() * sum(sizes) == pytest.approx(start.item() * sizes[0] + alone[2].item() * sizes[1], abs=2e-5)


def test_support_is_that_of_cross_entropy():
    """Right padding, masked prompts, packing: the window counts what ``num_items_in_batch`` counts."""
    rows = [{"prompt": "w3 w4 w5", "completion": " w6 w7"}, {"prompt": "w3", "completion": " w8 w9 w10 w11"}] * 4
    for extra in ({}, {"packing": True, "max_length": 16}):
        settings = one_step(train_dataset=datasets.Dataset.from_list(rows), per_device_train_batch_size=2, **extra)
        trainer = tiny_trainer(tiny_llama(), sft=True, **settings)
        batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, torch.device("cpu"))
        found = sum(batch_pairs(b, "labels") for b in batches)
        assert 0 < int(found) == int(items) < sum(int(batch_pairs(b, "all")) for b in batches)


def test_start_step_is_the_stock_run_until_then():
    runs = {}
    for name, options in {"stock": None, "late": {"start_step": 2}, "now": {}}.items():
        trainer = tiny_trainer(tiny_llama(), max_steps=3, logging_steps=1)
        if options is not None:
            hfplug.losses.add(trainer, "nitp", **options)
        trainer.train()
        runs[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert runs["late"][:2] == runs["stock"][:2]
    assert runs["late"][2] > runs["stock"][2] + 0.1
    assert runs["now"][0] > runs["stock"][0] + 0.1


def test_virtual_tokens_are_left_out():
    call = Call({"inputs_embeds": torch.zeros(1, 7, 2), "attention_mask": torch.ones(1, 7)}, training=True)
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.tensor([[5, 6, -100, 8]])}
    assert token_pairs(call, inputs, "labels").tolist() == [[False, False, False, True, False, True]]
    assert token_pairs(call, inputs, "all").tolist() == [[False, False, False, True, True, True]]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_of_peft_are_no_positions(kind):
    logged = []
    for size in (8, 1):
        config_class = peft.PromptTuningConfig if kind == "prompt" else peft.PrefixTuningConfig
        config = config_class(task_type="CAUSAL_LM", num_virtual_tokens=3)
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_llama(), config)
        trainer = tiny_trainer(model, **one_step(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size))
        hfplug.losses.add(trainer, "nitp")
        trainer.train()
        logged.append(trainer.state.log_history[0])
    assert logged[0]["nitp/loss"] == pytest.approx(logged[1]["nitp/loss"], abs=1e-6)
    assert logged[0]["loss"] == pytest.approx(logged[1]["loss"], abs=1e-5)


def test_saved_and_reloaded_model_generates_the_same(tmp_path):
    trainer = tiny_trainer(tiny_llama(), output_dir=tmp_path, learning_rate=0.1)
    hfplug.losses.add(trainer, "nitp")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[1, 5, 9]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(*(model.eval().generate(ids, **settings) for model in (trainer.model, again)))


def chain(rows, seed, noise=0.1, length=24):
    """Tokens that follow an affine map of their predecessor, replaced by a random one now and then."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=draw)
    for t in range(1, length):
        follow = 3 + (7 * (ids[:, t - 1] - 3) + 5) % (VOCAB - 3)
        ids[:, t] = torch.where(torch.rand(rows, generator=draw) < noise, ids[:, t], follow)
    return datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in ids.tolist()])


def test_learning():
    """The term falls below 0.2 from about 1 while the held-out cross-entropy stays within 2 % of the run without it."""
    found = {}
    for weight in (0.0, 1.0):
        trainer = tiny_trainer(
            tiny_llama(num_hidden_layers=5), train_dataset=chain(16 * 160, 0), eval_dataset=chain(128, 1), max_steps=160,
            logging_steps=20, per_device_train_batch_size=16, per_device_eval_batch_size=64, optim="adamw_torch",
            learning_rate=3e-3, lr_scheduler_type="linear",
        )  # fmt: skip
        hfplug.losses.add(trainer, "nitp", weight=weight)
        at_start = trainer.evaluate()["eval_loss"]
        trainer.train()
        found[weight] = trainer.evaluate()["eval_loss"]
        assert found[weight] < 0.25 * at_start
    course = [entry["nitp/loss"] for entry in trainer.state.log_history if "nitp/loss" in entry]
    assert course[0] > 0.3
    assert course[-1] < 0.2
    assert abs(found[1.0] / found[0.0] - 1) < 0.02


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1.0}, "weight=-1.0 must be finite and >= 0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"weight": True}, "weight=True"),
        ({"layer": 0}, "layer=0 must be finite and >= 1"),
        ({"layer": 1.5}, "layer=1.5"),
        ({"pairs": "lables"}, "did you mean 'labels'"),
        ({"hidden_multiple": 0}, "hidden_multiple=0"),
        ({"start_step": -1}, "start_step=-1"),
        ({"eps": 0.0}, "eps=0.0 must be finite and > 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        NITPConfig(**options)


def test_projector_has_12_d_squared_weights():
    assert sum(p.numel() for p in SwiGLUProjector(32).parameters()) == 12 * 32**2
    assert sum(p.numel() for p in SwiGLUProjector(32, 2).parameters()) == 6 * 32**2


def test_layers_that_cannot_be_found_are_named():
    model = tiny_llama()
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedError, match=r"config.num_hidden_layers=5 .* none; its lists: \{'layers': 2\}"):
        decoder_layers(model.model)
    model.config.num_hidden_layers = 2
    model.model.more = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(UnsupportedError, match=r"\['layers', 'more'\]"):
        decoder_layers(model.model)
    with pytest.raises(UnsupportedError, match="num_hidden_layers=None"):
        decoder_layers(nn.Linear(2, 2))


def test_batches_without_labels_say_what_to_do():
    call = Call({"input_ids": torch.ones(2, 5, dtype=torch.long)}, training=True)
    with pytest.raises(ConfigError, match=r"pairs='labels' needs 'labels' in the batch.*use pairs='all'"):
        token_pairs(call, {"input_ids": torch.ones(2, 5, dtype=torch.long)}, "labels")
    with pytest.raises(UnsupportedError, match=r"2 x 5 tokens but the batch holds \(2, 7\)"):
        token_pairs(call, {"input_ids": torch.ones(2, 7, dtype=torch.long)}, "all")
    assert batch_pairs([{"prompt": "x"}], "all") is None
    shifted = {"input_ids": torch.ones(2, 5, dtype=torch.long), "shift_labels": torch.tensor([[1, -100, 1, 1, -100]] * 2)}
    assert token_pairs(call, shifted, "labels").tolist() == [[True, False, True, True]] * 2
