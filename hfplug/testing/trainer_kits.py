"""What a trainer of each task of TRL needs for a step on the CPU: a tiny model, rows, settings, further arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfplug.testing.models import VOCAB, tiny_llama, tiny_tokenizer

# fp32, no clipping, nothing reported. SGD: Adam's first step is the sign of the gradient, which blows up rounding.
_SHARED: dict[str, Any] = {
    "max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no",
    "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 0, "activation_checkpointing": False,
}  # fmt: skip
# Two updates on one draw: the second is off-policy, so a ratio is not 1 throughout.
_SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"beta": 0.5},
    "reward": {},
    "grpo": {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "max_steps": 2},
    # TRL's own trainer takes other rows and draws other completions after a restart, unless it does neither at random.
    "distill": {"max_completion_length": 6, "shuffle_dataset": False, "generation_kwargs": {"do_sample": False}},
}


def settings(task: str) -> dict[str, Any]:
    """Fields of the task's config for one quick step (GRPO: two) in fp32."""
    return {**_SHARED, **_SETTINGS[task]}


def model(task: str, seed: int = 0) -> Any:
    """A new tiny Llama for the task, the same for the same seed; for ``reward`` with one score per sequence."""
    if task != "reward":
        return tiny_llama(seed)
    import torch
    from transformers import LlamaForSequenceClassification

    base = tiny_llama(seed)
    base.config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scorer = LlamaForSequenceClassification(base.config).float()
    scorer.model.load_state_dict(base.model.state_dict())
    return scorer


def rows(task: str, count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` rows of the columns TRL wants for the task; texts of different lengths over the tiny vocabulary."""
    import torch

    draw = torch.Generator().manual_seed(seed)

    def text(least: int, most: int) -> str:
        length = int(torch.randint(least, most + 1, (1,), generator=draw))
        return "".join(f"w{i} " for i in torch.randint(3, VOCAB, (length,), generator=draw).tolist())

    made: list[dict[str, Any]] = []
    for _ in range(count):
        prompt = text(2, 4)
        row: dict[str, Any] = {"prompt": prompt}
        if task == "sft":
            row["completion"] = text(2, 8)
        elif task in ("dpo", "reward"):
            row |= {"chosen": text(2, 7), "rejected": text(2, 7)}
        made.append(row)
    return made


def reward_of(completions: list[str], **_: Any) -> list[float]:
    """Share of even word numbers in a completion: a reward that differs within a group."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(n % 2 == 0 for n in row) / max(len(row), 1) for row in numbers]


def arguments(task: str) -> Mapping[str, Any]:
    """Further arguments of the constructor."""
    extra: dict[str, Any] = {"processing_class": tiny_tokenizer()}
    if task == "grpo":
        extra["reward_funcs"] = reward_of
    elif task == "distill":
        extra["teacher_model"] = model(task, seed=7)
    elif task == "dpo":
        extra["ref_model"] = model(task)
    return extra
