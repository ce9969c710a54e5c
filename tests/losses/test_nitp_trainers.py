"""NITP in trainers that build their batches themselves, and over two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import peft
import pytest
import torch
import trl

import hfplug.losses
from hfplug.errors import ConfigError
from hfplug.testing.loss import one_step
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.testing.ranks import run_ranks

SETTINGS = {
    "max_steps": 1, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "bf16": False,
    "use_cpu": True, "report_to": [], "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
LORA = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def dpo(folder, size, **options):
    """One DPO step on eight rows whose reference is the same model without its adapter."""
    rows = [
        {"prompt": "w3 w4 w5", "chosen": " w6 w7 w9", "rejected": " w8"},
        {"prompt": "w3", "chosen": " w8 w9", "rejected": " w10 w11"},
    ] * 4
    args = trl.DPOConfig(str(folder), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, **SETTINGS)
    trainer = trl.DPOTrainer(
        tiny_llama(), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(), peft_config=LORA,
    )  # fmt: skip
    with torch.no_grad():  # an adapter that does something, the same one every time
        draw = torch.Generator().manual_seed(0)
        for name, weight in trainer.model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    if options:
        hfplug.losses.add(trainer, "nitp", **options)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for n, p in trainer.model.named_parameters() if "lora_" in n and ".ref." not in n])
    return trainer.state.log_history[0], weights


def test_dpo(tmp_path):
    stock, alone = dpo(tmp_path, 8)
    whole, weights = dpo(tmp_path, 8, pairs="all", weight=0.5)
    parts, others = dpo(tmp_path, 2, pairs="all", weight=0.5)
    assert whole["loss"] == pytest.approx(stock["loss"] + 0.5 * whole["nitp/loss"], abs=1e-5)
    assert parts["nitp/loss"] == pytest.approx(whole["nitp/loss"], abs=1e-6)
    assert (weights - others).abs().max() <= 1e-6
    assert (weights - alone).abs().max() > 1e-5
    with pytest.raises(ConfigError, match="use pairs='all'"):
        dpo(tmp_path, 8, pairs="labels")


def test_grpo(tmp_path):
    """Batches are prompts, samples are drawn later: the term is the mean of each micro-batch over the window."""
    logs = {}
    for on in (False, True):
        args = trl.GRPOConfig(
            str(tmp_path), per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
            max_completion_length=4, **{**SETTINGS, "learning_rate": 0.0},
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            tiny_llama(), reward_funcs=lambda completions, **_: [float(len(c)) for c in completions], args=args,
            train_dataset=datasets.Dataset.from_list([{"prompt": "w3 w4"}, {"prompt": "w5 w6 w7"}] * 4),
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        if on:
            hfplug.losses.add(trainer, "nitp", pairs="all")
        torch.manual_seed(0)
        trainer.train()
        logs[on] = trainer.state.log_history[0]
    assert logs[True]["reward"] == logs[False]["reward"]
    # The logged metric weighs every pair alike, the loss every micro-batch: close, not equal.
    assert logs[True]["loss"] - logs[False]["loss"] == pytest.approx(logs[True]["nitp/loss"], abs=0.05)


# -- two ranks ----------------------------------------------------------------------------------------------------------

RUNS = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},  # DDP then does not look for unused parameters
    "sft": {"sft": True},
    "lora": {"lora": True},
    "late": {"start_step": 1},
    "local": {"average_tokens_across_devices": False},
}


def train(ranks, name, sft=False, lora=False, start_step=0, **settings):
    from hfplug.testing.models import tiny_trainer

    model = tiny_llama(num_hidden_layers=3)
    if lora:
        torch.manual_seed(0)
        model = peft.get_peft_model(model, LORA)
    cut = {"per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.05}
    trainer = tiny_trainer(model, sft=sft, **one_step(**cut, **settings))
    hfplug.losses.add(trainer, "nitp", start_step=start_step)
    trainer.train()
    return trainer


def worker(folder):
    """What each rank runs."""
    for name, settings in RUNS.items():
        trainer = train(2, name, **settings)
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        if trainer.args.process_index == 0:
            weights = {n: p.detach() for n, p in trainer.model.named_parameters()}
            torch.save({"weights": weights, "log": json.dumps(trainer.state.log_history)}, Path(folder) / f"{name}.pt")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_equal_one(tmp_path):
    run_ranks(__file__, str(tmp_path), timeout=280)
    for name, settings in RUNS.items():
        found = torch.load(tmp_path / f"{name}.pt")
        one = train(1, name, **settings)
        log, expected = json.loads(found["log"]), one.state.log_history
        steps = 1 if name == "local" else 2
        metric = [[e["nitp/loss"] for e in entries[:steps]] for entries in (log, expected)]
        assert metric[0] == pytest.approx(metric[1], abs=2e-6), name
        if name == "local":  # the step is then the mean of each rank's own means, as it is for the stock loss
            continue
        worst = max(float((found["weights"][n] - p.detach()).abs().max()) for n, p in one.model.named_parameters())
        assert worst <= 1e-6, name
        assert [e["loss"] for e in log[:2]] == pytest.approx([e["loss"] for e in expected[:2]], abs=1e-5), name


if __name__ == "__main__":
    worker(sys.argv[1])
