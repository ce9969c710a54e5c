"""Claim check: held-out loss of U-LoRA against LoRA after equal steps, at (nearly) equal parameters, three seeds.

The paper claims results competitive with LoRA at comparable budgets; its figures are not public. Expected before measuring:
no difference beyond the spread of the seeds in so few steps, since the gates start at rest and are 1.8 % of the parameters.

    python benchmarks/ulora_claim.py        # about 5 minutes on two cores

SmolLM2-135M on the demo's data, q_proj and v_proj, r = 8, the same learning rate, data order and steps for both.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from _bench import ROOT, write

from hfplug.building import build_trainer
from hfplug.models import resolve_model
from hfplug.training import parse_sft

STEPS, SEEDS = 16, (0, 1, 2)
TARGETS = ["q_proj", "v_proj"]
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": TARGETS, "lora_dropout": 0.0}
ULORA = {"plugins": {"tuner": {"type": "ulora", "r": 8, "lora_alpha": 16, "target_modules": TARGETS}}}


def train(method: dict[str, Any], seed: int, folder: Path) -> tuple[float, float, int]:
    """Held-out loss before and after, and the number of trainable parameters."""
    run = {
        "model_name_or_path": "smollm2", "dataset_name": str(folder / "data"), "output_dir": str(folder / "out"), "seed": seed,
        "max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_length": 192, "eval_strategy": "steps", "eval_steps": STEPS,
        "eval_on_start": True, "logging_steps": STEPS, "report_to": "none", "save_strategy": "no", "bf16": False,
        "activation_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True, **method,
    }  # fmt: skip
    trainer = build_trainer(parse_sft(run))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return losses[0], losses[-1], sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)


def main() -> None:
    """Train both with every seed, print the table, write the result."""
    sys.path.insert(0, str(ROOT / "examples"))
    import demo_data
    from transformers import AutoTokenizer

    found: dict[str, list[tuple[float, float, int]]] = {"lora": [], "ulora": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
        demo_data.write_jsonl(demo_data.build_rows(demo_data.token_counter(tokenizer)), folder / "data")
        for seed in SEEDS:
            for kind, method in (("lora", LORA), ("ulora", ULORA)):
                found[kind].append(train(method, seed, folder))
                print(f"seed {seed} {kind}: {found[kind][-1][0]:.4f} -> {found[kind][-1][1]:.4f}", flush=True)
    gaps = [u[1] - b[1] for u, b in zip(found["ulora"], found["lora"], strict=True)]
    verdict = f"U-LoRA minus LoRA: {mean(gaps):+.4f} nats (standard deviation {stdev(gaps):.4f} over {len(SEEDS)} seeds)"
    print(verdict)
    rows = {kind: [{"before": a, "after": b, "parameters": n} for a, b, n in runs] for kind, runs in found.items()}
    claim = str(__doc__).splitlines()[0]
    print(write("ulora_claim", {"claim": claim, "steps": STEPS, "runs": rows, "gaps": gaps, "verdict": verdict}))


if __name__ == "__main__":
    main()
