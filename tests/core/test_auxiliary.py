"""What a loss term trains beside the model: seen by the optimizer, absent from the model, kept beside checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import Trainer

import hfplug.losses
from hfplug import auxiliary
from hfplug.errors import ConfigError
from hfplug.testing.loss import one_step
from hfplug.testing.models import tiny_llama, tiny_trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_auxiliary_is_seen_by_the_optimizer_and_hidden_from_the_state_dict():
    trainer = tiny_trainer(tiny_llama())
    names = list(trainer.model.state_dict())
    handle = hfplug.losses.add(trainer, "nitp")
    assert list(trainer.model.state_dict()) == names
    assert list(nn.Sequential(trainer.model).state_dict()) == [f"0.{name}" for name in names]
    assert sorted(handle.auxiliary.state_dict()) == ["down.weight", "gate.weight", "up.weight"]
    assert list(copy.deepcopy(trainer.model).state_dict()) == names
    trainer.model.load_state_dict(trainer.model.state_dict())  # strict
    missing = dict(trainer.model.state_dict())
    del missing["lm_head.weight"]
    assert trainer.model.load_state_dict(missing, strict=False).missing_keys == ["lm_head.weight"]
    trainer.create_optimizer()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in handle.auxiliary.parameters()} <= held


def test_peft_freezes_the_model_but_not_the_auxiliary():
    import peft

    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = tiny_trainer(model, sft=True, **one_step(learning_rate=0.1))
    handle = hfplug.losses.add(trainer, "nitp")
    projector, base = handle.auxiliary, model.base_model.model.model.layers[0].mlp.up_proj.weight
    before = {n: p.detach().clone() for n, p in projector.named_parameters()}, base.detach().clone()
    assert not [k for k in peft.get_peft_model_state_dict(model) if "hfplug" in k]
    trainer.train()
    assert all(not torch.equal(p, before[0][n]) for n, p in projector.named_parameters())
    assert torch.equal(base, before[1])


def test_a_copy_of_the_model_is_not_listened_to():
    """A reference model made by deepcopy after ``add`` runs inside compute_loss and must not add a second term."""

    class WithReference(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.reference(**inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    plain, referring = (tiny_trainer(tiny_llama(), trainer_class=c, **one_step()) for c in (Trainer, WithReference))
    for each in (plain, referring):
        hfplug.losses.add(each, "nitp")
    referring.reference = copy.deepcopy(referring.model).train()
    plain.train()
    referring.train()
    assert torch.equal(weights(plain), weights(referring))


def test_forwards_without_gradient_do_not_count_in_training():
    class Twice(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            with torch.no_grad():
                model(**inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    plain, twice = (tiny_trainer(tiny_llama(), trainer_class=c, **one_step()) for c in (Trainer, Twice))
    for each in (plain, twice):
        hfplug.losses.add(each, "nitp")
        each.train()
    assert torch.equal(weights(plain), weights(twice))
    for key in ("loss", "nitp/loss"):
        assert plain.state.log_history[0][key] == twice.state.log_history[0][key]


def test_depend_gives_the_graph_an_edge_and_no_gradient():
    x, p = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    total = (x.detach() * p).sum()
    hidden = auxiliary.depend((x * 1, "rest"), total)
    assert hidden[1] == "rest"
    assert torch.equal(hidden[0], x)
    seen, nodes = set(), [hidden[0].grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [n for n, _ in node.next_functions]
    assert any(getattr(n, "variable", None) is p for n in seen)
    hidden[0].sum().backward()
    assert p.grad is None or not p.grad.any()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_b52_a_file_of_another_shape_is_refused(tmp_path):
    first = tiny_trainer(tiny_llama(), output_dir=tmp_path, **one_step(save_strategy="steps", save_steps=1))
    hfplug.losses.add(first, "nitp")
    first.train()
    second = tiny_trainer(tiny_llama(), output_dir=tmp_path, **one_step(max_steps=2))
    hfplug.losses.add(second, "nitp", hidden_multiple=2)
    with pytest.raises(ConfigError, match=r"does not fit.*\(128, 32\).*needed is.*\(64, 32\)"):
        second.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("step", ["os.fsync", "Path.replace"])
def test_a_failed_write_leaves_the_former_file(step, tmp_path, monkeypatch):
    path = tmp_path / "hfplug_aux_nitp.safetensors"
    module = nn.Linear(2, 1)
    auxiliary.save(module, path, {})
    former = path.read_bytes()
    nn.init.zeros_(module.weight)
    module_name, _, name = step.partition(".")
    monkeypatch.setattr(getattr(auxiliary, module_name), name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        auxiliary.save(module, path, {})
    assert path.read_bytes() == former
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
