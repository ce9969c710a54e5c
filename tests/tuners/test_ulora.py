"""U-LoRA: the contract, the gate against its reference, what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import peft
import pytest
import torch

from hfplug import ConfigError, UnsupportedError
from hfplug.testing import models
from hfplug.testing.tuner import FAMILIES, TunerContract
from hfplug.tuners import ULoraConfig
from hfplug.tuners.ulora.gate import Gate, context_mean, normalised
from hfplug.tuners.ulora.reference import utilisation

EPS = 1e-6


class TestULoraContract(TunerContract):
    method, options, dropout = "ulora", {"r": 4}, {"lora_dropout": 0.2}
    export = "approximate"
    merge: ClassVar[dict[str, Any]] = {"merge_mode": "mean", "ema_weight": 1.0}


# -- the neutral setting is LoRA, bit for bit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"ema_weight": 0.0}, {"ema_weight": 1.0}, {"lora_dropout": 0.3, "use_rslora": True}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_gates_at_rest_it_is_lora_bit_for_bit(kit, family, options):
    ids, shared = kit.ids(), {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    shared |= {k: v for k, v in options.items() if k != "ema_weight"}
    lora = peft.get_peft_model(models.TINY_MODELS[family](), peft.LoraConfig(**shared, init_lora_weights=False))
    ours = kit.wrap(models.TINY_MODELS[family](), **options)
    with torch.no_grad():
        for name, weight in lora.named_parameters():
            if "lora_" in name:
                ours.get_parameter(name.replace("lora_", "ulora_")).copy_(weight)
    assert torch.equal(kit.logits(ours, ids), kit.logits(lora, ids))
    gradients = []
    for model in (lora, ours):
        torch.manual_seed(5)  # dropout draws the same
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n.replace("ulora_", "lora_"): p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert kit.off(gradients[1][name], gradient) <= 1e-6, name


def test_parameters_are_those_of_lora_and_two_r_squared_plus_r_per_module(kit):
    r = 4
    lora = peft.get_peft_model(models.tiny_llama(), peft.LoraConfig(r=r, target_modules="all-linear"))
    ours = kit.wrap(models.tiny_llama(), r=r)
    modules = len(kit.layers(ours))
    assert modules == 14
    extra = ours.get_nb_trainable_parameters()[0] - lora.get_nb_trainable_parameters()[0]
    assert extra == modules * (2 * r * r + r)
    hidden = kit.wrap(models.tiny_llama(), r=r, gate_input="hidden")
    inputs = sum(layer.in_features for layer in kit.layers(hidden))
    extra = hidden.get_nb_trainable_parameters()[0] - lora.get_nb_trainable_parameters()[0]
    assert extra == modules * (r * r + r) + inputs * r


# -- the layer against the reference -----------------------------------------------------------------------------------

VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 1]]).bool()
RESTARTS = {
    "none": None,
    "per row": torch.tensor([[0, 0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0], [0] * 7]).bool(),
    "shared": torch.tensor([[0, 0, 1, 0, 0, 1, 0]]).bool(),
}


def utilised(gate, z, valid, restarts, bidirectional, ema, weight):
    code = normalised(z, EPS)
    mean, _, _ = context_mean(code, valid, restarts, None, bidirectional)
    u = gate(code, mean)
    return u + weight * (ema - u)


@pytest.mark.parametrize("restarts", RESTARTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_gate_against_its_reference_forward_and_backward(restarts, masked, bidirectional):
    torch.manual_seed(0)
    gate = Gate(5, 5, 0.7)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    z, ema, valid = torch.randn(3, 7, 5) * 3, torch.rand(5) * 2, VALID if masked else None
    leaves = {"z": z, **dict(gate.named_parameters())}
    doubles = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    expected = utilisation(
        doubles["z"], doubles["token"], doubles["context"], doubles["bias"], gate_range=0.7, eps=EPS, ema=ema, ema_weight=0.2,
        valid=valid, restarts=RESTARTS[restarts], bidirectional=bidirectional,
    )  # fmt: skip
    z.requires_grad_()
    found = utilised(gate, z, valid, RESTARTS[restarts], bidirectional, ema, 0.2)
    direction = torch.randn(found.shape)
    if masked:  # what padding tokens get is nobody's business
        direction = direction * valid.unsqueeze(-1)
        found, expected = found * valid.unsqueeze(-1), expected * valid.unsqueeze(-1)

    def ratio(a, b):
        return ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()

    assert ratio(found, expected) <= 1e-6
    (found * direction).sum().backward()
    (expected * direction.double()).sum().backward()
    for name, leaf in leaves.items():
        assert ratio(leaf.grad, doubles[name].grad) <= 1e-5, name


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("restarts", RESTARTS)
def test_a_sequence_in_two_chunks_is_the_sequence(cut, restarts):
    torch.manual_seed(0)
    code, again = torch.randn(3, 7, 5, dtype=torch.float64), RESTARTS[restarts]
    whole, total, count = context_mean(code, VALID, again, None)
    parts = [None if again is None else again[:, :cut], None if again is None else again[:, cut:].clone()]
    if again is not None and again[:, cut].any():
        pytest.skip("a document that begins at the chunk is told by its positions in the chunk before")
    first, *past = context_mean(code[:, :cut], VALID[:, :cut], parts[0], None)
    second, total2, count2 = context_mean(code[:, cut:], VALID[:, cut:], parts[1], tuple(past))
    assert (torch.cat([first, second], 1) - whole).abs().max() <= 1e-12
    assert (total2 - total).abs().max() <= 1e-12
    assert torch.equal(count2, count)


def test_a_token_stays_within_gate_range_of_its_context():
    torch.manual_seed(0)
    code, other, context = (torch.randn(2, 50, 4, dtype=torch.float64) * scale for scale in (10, 10, 2))
    for delta in (0.0, 0.5, 2.0):
        gate = Gate(4, 4, delta).double()
        for parameter in gate.parameters():
            torch.nn.init.normal_(parameter)
        u = gate(code, context)
        q = torch.nn.functional.linear(context, gate.context, gate.bias)
        assert ((torch.logit(u / 2) - q).abs() <= delta + 1e-6).all()
        assert ((u - 2 * torch.sigmoid(q)).abs() <= delta / 2 + 1e-12).all()
        assert ((u > 0) & (u < 2)).all()
        assert torch.equal(gate(other, context), u) == (delta == 0)


def test_the_gate_does_not_see_the_scale_of_a():
    z = torch.randn(2, 5, 4)
    assert torch.allclose(normalised(z * 1000, EPS), normalised(z, EPS), atol=1e-5)


def test_a_token_whose_code_is_zero_gives_finite_gradients(kit):
    """The embedding of the padding token is zero, so is its code; sqrt has no derivative there."""
    model = kit.wrap(models.tiny_llama(), stir=0.3).train()
    ids = kit.ids()
    ids[0, :4] = kit.pad
    for mask in (None, (ids != kit.pad).long()):
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(ids == kit.pad, -100)).loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# -- learning ----------------------------------------------------------------------------------------------------------


def test_the_gates_learn_once_b_has_moved(kit):
    model, ids = kit.wrap(models.tiny_llama()).train(), kit.ids()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    moved = []
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gates = [dict(layer.ulora_gate["default"].named_parameters()) for layer in kit.layers(model)]
        moved.append({name: all(gate[name].abs().max() > 0 for gate in gates) for name in gates[0]})
    assert moved == [{"token": False, "context": False, "bias": False}, {"token": True, "context": True, "bias": True}]


def test_the_gates_have_a_learning_rate_of_their_own_and_no_weight_decay(kit):
    from hfplug.tuners import use_optimizer_groups

    model = kit.wrap(models.tiny_llama(), gate_lr_multiplier=3.0)
    trainer = models.tiny_trainer(model, optim="adamw_torch", weight_decay=0.1, learning_rate=1e-3, max_steps=1)
    use_optimizer_groups(trainer)
    trainer.train()
    gates = {id(p) for layer in kit.layers(model) for p in layer.ulora_gate.parameters()}
    settings = {True: set(), False: set()}
    for group in trainer.optimizer.param_groups:
        inside = {id(p) in gates for p in group["params"]}
        assert len(inside) == 1, "gates share a group with other parameters"
        settings[inside.pop()].add((round(group["initial_lr"], 9), group["weight_decay"]))
    assert settings[True] == {(3e-3, 0.0)}
    assert settings[False] == {(1e-3, 0.1)}


def test_merging_the_mean(kit):
    for family in FAMILIES:
        model, ids = kit.wrap(models.TINY_MODELS[family](), stir=0.2, ema_weight=1.0, merge_mode="mean"), kit.ids()
        expected = kit.logits(model, ids)
        for layer in kit.layers(model):
            assert torch.linalg.matrix_rank(layer.get_delta_weight("default")) <= 4
        assert kit.off(kit.logits(model.merge_and_unload(), ids), expected) <= 1e-5
    model = kit.wrap(models.tiny_llama(), stir=0.2, merge_mode="mean")  # lambda 0.1: an approximation, and no more
    expected = kit.logits(model, ids)
    assert kit.off(kit.logits(model.merge_and_unload(), ids), expected) > 1e-3


def test_b49_merging_is_refused_by_name(kit):
    model = kit.wrap(models.tiny_llama(), stir=0.2)
    with pytest.raises(UnsupportedError, match=r"merge_mode = 'mean'"):
        model.merge_and_unload()


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"r": 0}, "r=0"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"ema_weight": 1.5}, "ema_weight"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"gate_range": -1.0}, "gate_range"),
        ({"context": "casual"}, "causal"),
        ({"gate_inputs": "code"}, "gate_input"),
        ({"r": "8"}, "r="),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, named):
    from hfplug.tuners import config

    with pytest.raises(ConfigError, match=named):
        config(type="ulora", **options)


def test_a_config_made_directly_is_checked_too():
    with pytest.raises(ConfigError, match="ema_weight"):
        ULoraConfig(ema_weight=2.0)


@pytest.mark.parametrize(
    ("targets", "error", "named"),
    [
        (["q_proj", "lm_head"], ConfigError, "lm_head"),
        (["q_proj", "embed_tokens"], UnsupportedError, "Embedding"),
        (["q_proj", "norm"], UnsupportedError, "LlamaRMSNorm"),
    ],
    ids=str,
)
def test_targets_it_cannot_take_are_refused_with_nothing_changed(kit, targets, error, named):
    model = models.tiny_llama()
    before, state = [type(m) for m in model.modules()], sorted(vars(model.model))
    with pytest.raises(error, match=named):
        kit.wrap(model, target_modules=targets)
    assert [type(m) for m in model.modules()] == before
    assert sorted(vars(model.model)) == state
    assert all(p.requires_grad for p in model.parameters())
    kit.wrap(model)


def test_a_rank_too_large_for_a_later_module_changes_nothing(kit):
    model = kit.wrap(models.tiny_llama(), stir=0.2)  # k_proj is 32 x 16, and comes after q_proj
    before, expected = [type(m) for m in model.modules()], kit.logits(model, kit.ids())
    with pytest.raises(ConfigError, match="r=20"):
        model.add_adapter("b", ULoraConfig(r=20, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert [type(m) for m in model.modules()] == before
    assert torch.equal(kit.logits(model, kit.ids()), expected)
    model.add_adapter("b", ULoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def test_an_encoder_decoder_is_refused(kit):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        kit.wrap(T5ForConditionalGeneration(config), target_modules=["q"], task_type="SEQ_2_SEQ_LM")


def test_bidirectional_context_on_a_causal_model_is_refused(kit):
    with pytest.raises(ConfigError, match="leaks future"):
        kit.wrap(models.tiny_llama(), context="bidirectional")
    with pytest.raises(ConfigError, match="leaks future"):
        kit.wrap(models.tiny_gpt2(), context="bidirectional", task_type=None)


def test_mixed_batches_are_refused(kit):
    model = kit.wrap(models.tiny_llama(), stir=0.2)
    with pytest.raises(UnsupportedError, match="adapter_names"):
        model.eval()(input_ids=kit.ids(), adapter_names=["default", "__base__"])


class Flat(torch.nn.Module):
    """A model that gives its linear module flattened tokens, as the experts of a mixture get them."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(x.flatten(0, 1)).view_as(x)


def test_flattened_tokens_are_refused(kit):
    model = kit.wrap(Flat(), target_modules=["lin"], task_type=None)
    with pytest.raises(UnsupportedError, match="2 dimensions"):
        model(torch.randn(2, 3, 8))
