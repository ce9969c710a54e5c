"""MoLoRA: only the router trains, it learns from the language model loss, and what RouterLoss adds."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

import hfplug
from hfplug import ConfigError, UnsupportedError
from hfplug.testing import models
from hfplug.tuners import LabelCollator, RouterLoss, RouterLossConfig
from hfplug.tuners.molora.state import LOGITS, ModelState

NAMES = ("code", "math", "talk")


def trainable(model):
    return {n for n, p in model.named_parameters() if p.requires_grad}


def test_experts_stay_frozen_through_every_switch(molora):
    model = molora.wrap(models.tiny_llama())
    routers = {n for n, _ in model.named_parameters() if "molora_router" in n}
    assert trainable(model) == routers
    model.add_adapter("b", molora.config(experts=molora.experts("llama", ("math", "talk"))))
    frozen = {n: p.clone() for n, p in model.named_parameters() if "molora_experts" in n}
    seen = []
    for switch in (
        lambda: model.set_adapter("b"), lambda: model.set_adapter("default"), model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers, lambda: model.set_requires_grad("b", True), model.train, model.eval,
        lambda: model.base_model.set_adapter(["default", "b"]), model.enable_input_require_grads,
    ):  # fmt: skip
        switch()
        seen.append(len(trainable(model)))
        assert not [n for n in trainable(model) if "molora_router" not in n]
    assert max(seen) == 2 * len(routers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    ids = molora.ids()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(torch.equal(model.get_parameter(n), p) for n, p in frozen.items())
    with model.disable_adapter():
        assert not trainable(model)
    assert not [n for n in trainable(model) if "molora_router" not in n]


def test_two_adapters_with_other_experts_and_scopes_are_independent(molora):
    ids, two = molora.ids(), molora.experts("llama", ("math", "talk"))
    single = molora.wrap(models.tiny_llama(), seed=5, experts=two, router_scope="module")
    alone = molora.logits(single, ids)
    model = molora.wrap(models.tiny_llama())
    first = molora.logits(model, ids)
    model.add_adapter("b", molora.config(experts=two, router_scope="module"))
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            if "molora_router" in name:
                model.get_parameter(name.replace(".default.", ".b.")).copy_(parameter)
    assert torch.equal(molora.logits(model, ids), first)
    model.set_adapter("b")
    assert torch.equal(molora.logits(model, ids), alone)
    model.delete_adapter("default")
    assert torch.equal(molora.logits(model, ids), alone)
    assert not any("default" in n for n in model.state_dict())


def llama():
    """With logits that are not flat."""
    return models.tiny_llama(initializer_range=0.1)


@pytest.fixture(scope="module")
def domains(molora):
    """Two LoRA folders; ids of both halves of the vocabulary; as targets what each says of its half."""
    settings = {"scale": 0.15, "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    folders = {
        name: str(molora.make_lora(llama(), molora.folder(), seed=i, **settings)) for i, name in enumerate(("code", "math"))
    }
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(lo, hi, (16, 8), generator=generator) for lo, hi in ((3, 33), (33, 64))]
    loras = [peft.PeftModel.from_pretrained(llama(), folder) for folder in folders.values()]
    targets = [molora.logits(lora, tokens).argmax(-1) for lora, tokens in zip(loras, ids, strict=True)]
    return folders, torch.cat(ids), torch.cat(targets)


def loss_of(model, ids, targets):
    return torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "options", [{}, {"null_expert": False}, {"router_scope": "model", "router_layer": 0}, {"router_scope": "module"},
                {"routing": "soft"}], ids=str
)  # fmt: skip
def test_the_router_learns_from_the_language_model_loss(domains, options):
    """From its fresh state past the best single expert, most of the way to each row through its own expert."""
    folders, ids, targets = domains
    config = hfplug.tuners.config(type="molora", task_type="CAUSAL_LM", experts=folders, router_hidden=32, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config)
    with torch.no_grad():
        with hfplug.tuners.routing(model, adapter_ids=["code"] * 16 + ["math"] * 16):
            best = loss_of(model, ids, targets)
        singles = []
        for name in folders:
            with hfplug.tuners.routing(model, expert=name):
                singles.append(loss_of(model, ids, targets))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(100):
        loss = loss_of(model, ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        end = loss_of(model, ids, targets)
    assert end - best < 0.5 * (min(singles) - best), f"{end:.3f}; best single expert {min(singles):.3f}, at best {best:.3f}"


def rows(molora):
    """A data set with a label for each token: slot 1 for ids below 33, slot 2 from there, none for the first token."""
    data = models.tiny_lm_dataset(32, seed=3)
    return data.map(lambda row: {"adapter_labels": [-100, *(1 if i < 33 else 2 for i in row["input_ids"][1:])]})


@pytest.mark.parametrize("sft", [False, True], ids=["trainer", "sft"])
def test_token_labels_in_two_lines(molora, sft, monkeypatch):
    experts = {n: molora.expert("llama", n) for n in ("code", "math")}
    model = molora.wrap(models.tiny_llama(), experts=experts, router_hidden=32)
    collator = models.PadTo()
    if sft:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        collator = DataCollatorForLanguageModeling(pad_token_id=models.PAD)
    trainer = models.tiny_trainer(
        model, sft=sft, train_dataset=rows(molora), data_collator=LabelCollator(collator), remove_unused_columns=False,
        max_steps=40, per_device_train_batch_size=8, learning_rate=1e-2, optim="adamw_torch", logging_steps=10,
        **({"dataset_kwargs": {"skip_prepare_dataset": True}} if sft else {}),
    )  # fmt: skip
    hfplug.losses.add(trainer, RouterLoss(RouterLossConfig(label_weight=5.0)))
    trainer.train()
    logged = [entry["molora_router/loss"] for entry in trainer.state.log_history if "molora_router/loss" in entry]
    assert logged[-1] < 0.3 * logged[0]
    ids = molora.ids(rows=8, seed=7)
    domains = torch.where(ids < 33, 1, 2)
    made, stock = [], ModelState._routed
    monkeypatch.setattr(ModelState, "_routed", lambda *args: made.append(stock(*args)) or made[-1])
    molora.logits(model, ids)
    assert min((d.index.squeeze(-1) == domains).float().mean() for d in made) > 0.9
    assert not model._forward_pre_hooks, "the term left a hook on the model"


def test_the_term_against_its_formula(molora):
    """Balance and z over real tokens only; cross-entropy over labelled tokens; the mean over the routers."""
    model, ids = molora.wrap(models.tiny_llama(), seed=2).train(), molora.ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = torch.randint(0, 4, ids.shape, generator=torch.Generator().manual_seed(0)).masked_fill(mask == 0, -100)
    labels[1, 5] = -100
    scope = hfplug.calls.call_scope(model.get_base_model())
    model(input_ids=ids, attention_mask=mask)
    call = scope.current
    found = call.memo[LOGITS]
    assert len(found) == 2
    for given in (None, labels):
        inputs = {"input_ids": ids, "attention_mask": mask} | ({} if given is None else {"adapter_labels": given})
        term = RouterLoss(RouterLossConfig(label_weight=0.5, load_balance=0.3, z_loss=0.2))
        expected, kept = 0.0, (mask == 1) if given is None else given != -100
        for each in found:
            total = 0.0
            p = each.logits.detach().double().softmax(-1)[kept]
            z = each.logits.detach().double().exp().sum(-1).log()[kept]
            chosen = each.index.squeeze(-1)[kept]
            if given is None:
                total += 0.3 * 4 * sum((chosen == k).double().mean() * p[:, k].mean() for k in range(4))
            else:
                total += 0.5 * -p.gather(1, given[kept][:, None]).log().mean()
            expected += (total + 0.2 * z.square().mean()) / 2
        result = term.compute(inputs, call)
        assert result.count == kept.sum() == term.support(inputs)
        assert abs(result.total / result.count - expected) <= 1e-6
        (gradient,) = torch.autograd.grad(result.total, found[-1].logits, retain_graph=True)
        assert gradient[kept].abs().sum(-1).min() > 0
        assert gradient[~kept].abs().max() == 0


@pytest.mark.parametrize("null_expert", [True, False])
def test_labels_out_of_range_are_refused(molora, null_expert):
    model, ids = molora.wrap(models.tiny_llama(), null_expert=null_expert).train(), molora.ids()
    model(input_ids=ids)
    call = hfplug.calls.call_scope(model.get_base_model()).current
    for labels, said in (
        (torch.full_like(ids, 4), "from 4 to 4"), (torch.zeros(1, 2, dtype=torch.int64), r"\(1, 2\)"),
        *([] if null_expert else [(torch.zeros_like(ids), "1 to 3")]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            RouterLoss(RouterLossConfig()).compute({"input_ids": ids, "adapter_labels": labels}, call)
    with pytest.raises(ConfigError, match="z_loss=-1"):
        RouterLossConfig(z_loss=-1)


def test_the_term_needs_a_router(molora):
    trainer = models.tiny_trainer(models.tiny_llama(), max_steps=1)
    hfplug.losses.add(trainer, RouterLoss(RouterLossConfig()))
    with pytest.raises(UnsupportedError, match="no learned router"):
        trainer.train()


@pytest.mark.parametrize("scope", ["layer", "module"])
def test_checkpointing_counts_the_term_once(molora, scope):
    """Same gradients with and without checkpointing, the term included."""
    found = []
    for checkpointing in (False, True):
        model = molora.wrap(models.tiny_llama(), router_scope=scope, router_hidden=16)
        options = (
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "gradient_checkpointing": True} if checkpointing else {}
        )
        trainer = models.tiny_trainer(model, max_steps=1, logging_steps=1, learning_rate=1.0, **options)
        hfplug.losses.add(trainer, RouterLoss(RouterLossConfig(weight=10.0)))
        trainer.train()
        found.append({n: copy.deepcopy(p.detach()) for n, p in model.named_parameters() if p.requires_grad})
        logged = [e["molora_router/loss"] for e in trainer.state.log_history if "molora_router/loss" in e]
        found[-1]["logged"] = torch.tensor(logged)
    for name, value in found[0].items():
        assert molora.off(found[1][name], value) <= 1e-6, name


def test_collator_pads_labels_as_ids():
    data = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5], "adapter_labels": [1, 2, 0]}, {"input_ids": [6], "labels": [6],
             "adapter_labels": [1]}]  # fmt: skip
    for side in ("right", "left"):
        batch = LabelCollator(models.PadTo(side=side), side)(data)
        short = [1, -100, -100] if side == "right" else [-100, -100, 1]
        assert batch["adapter_labels"].tolist() == [[1, 2, 0], short]
        assert (batch["adapter_labels"] != -100).equal(batch["attention_mask"] == 1)
    with pytest.raises(ConfigError, match="side='top'"):
        LabelCollator(models.PadTo(), "top")
