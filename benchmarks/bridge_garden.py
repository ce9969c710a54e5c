"""Bridge-Garden against hard labels alone and soft labels alone, off-policy, on a language of bridges and gardens.

After half of the words one word is right (a bridge: any other leads where the language never goes), after the other half eight
are equally good (a garden). The teacher is the exact table; the data are 192 of its texts; the student is a Llama of two layers
and width 16, too narrow for the table to be easy. Seven arms of ``BridgeGardenTrainer`` from one student on one data set, three
seeds: hard (``static`` 0), soft (``static`` 1), static .5, confidence, entropy, curriculum .5, risk .1 at .5.

Measured: ``legal``: share of the student's own texts of 12 words without a wrong step after a bridge; ``coverage``: exp of its
entropy over the eight good words, over 8; and their product.

Expected before measuring (the notes on the paper): hard labels give more legal texts and less coverage than soft ones, soft
labels the reverse, and confidence and entropy have a product at least that of both. Where the teacher is an exact table hard
labels are only samples of it, so the gap between them may be the noise of 192 texts rather than a matter of bridges.

    python benchmarks/bridge_garden.py            # about 3 minutes of one core
    python benchmarks/bridge_garden.py --quick    # one seed, few steps: that it runs; writes nothing
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import copy
import statistics
import tempfile
import time
from typing import Any

import _bench
import _markov
import datasets
import torch

from hfplug.testing.models import tiny_tokenizer
from hfplug.trainers import BridgeGardenConfig, BridgeGardenTrainer

METHODS = ("bridge_garden",)

SEEDS, STEPS, BATCH, TEXTS, LENGTH, WIDTH, RATE = (0, 1, 2), 300, 32, 192, 16, 16, 1e-2
ARMS: dict[str, dict[str, Any]] = {
    "hard": {"garden_variant": "static", "garden_soft_weight": 0.0},
    "soft": {"garden_variant": "static", "garden_soft_weight": 1.0},
    "static .5": {"garden_variant": "static", "garden_soft_weight": 0.5},
    "confidence": {"garden_variant": "confidence"},
    "entropy": {"garden_variant": "entropy"},
    "curriculum": {"garden_variant": "curriculum", "garden_soft_weight": 0.5},
    "risk": {"garden_variant": "risk", "garden_soft_weight": 0.5, "garden_risk_weight": 0.1},
}


def learn(options: dict[str, Any], start: Any, teacher: Any, texts: torch.Tensor, seed: int, steps: int) -> Any:
    """A student trained in one arm."""
    rows = [{"input_ids": row, "labels": row} for row in texts.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        config = BridgeGardenConfig(
            folder, bf16=False, use_cpu=True, report_to=[], save_strategy="no", activation_checkpointing=False, disable_tqdm=True,
            logging_steps=1000, lr_scheduler_type="cosine", max_steps=steps, per_device_train_batch_size=BATCH,
            learning_rate=RATE, seed=seed, **options,
        )  # fmt: skip
        trainer = BridgeGardenTrainer(
            copy.deepcopy(start), teacher_model=teacher, args=config, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        trainer.train()
    return trainer.model


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    runs, said = result["runs"], result["expected"]
    both = [all(held for claim, held in said.items() if claim.startswith(f"{arm}:")) for arm in ("confidence", "entropy")]
    return _bench.ResultRow(
        "a hybrid of hard and soft labels is at least as good as either: legal texts times coverage of the teacher's choices",
        "hybrids above hard-only and soft-only distillation",
        "; ".join(f"{name} {_bench.spread([r['product'] for r in found])}" for name, found in runs.items()),
        "reproduced" if all(both) else "partly reproduced" if any(both) else "not reproduced",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    seeds, steps = (SEEDS[:1], 20) if options.quick else (SEEDS, STEPS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for seed in seeds:
        probabilities, many = _markov.table(seed)
        teacher, start = _markov.teacher(probabilities), _markov.student(seed, WIDTH)
        texts = _markov.walk(probabilities, TEXTS, LENGTH, 100 + seed)
        for name in ARMS if seed % 2 == 0 else reversed(ARMS):
            run = _markov.compare(learn(ARMS[name], start, teacher, texts, seed, steps), probabilities, many, seed)
            found[name].append({**run, "product": run["legal"] * run["coverage"]})
    keys = ("legal", "coverage", "product", "legal_all", "right_one", "forward_kl_many", "distinct")
    for name, runs in found.items():
        print(f"{name:>10}: " + "  ".join(f"{k} {statistics.mean(r[k] for r in runs):.3f}" for k in keys))

    def above(a: str, b: str, key: str) -> bool:
        return all(x[key] >= y[key] for x, y in zip(found[a], found[b], strict=True))

    verdict = {
        "hard labels: more legal texts than soft, every seed": above("hard", "soft", "legal"),
        "soft labels: more coverage than hard, every seed": above("soft", "hard", "coverage"),
        **{
            f"{name}: product at least that of {other}, every seed": above(name, other, "product")
            for name in ("confidence", "entropy") for other in ("hard", "soft")
        },
    }  # fmt: skip
    print("\n".join(f"{'yes' if held else 'NO '}  {claim}" for claim, held in verdict.items()))
    print(f"{time.process_time() - began:.0f} s of CPU time")
    if not options.quick:
        result = {"seeds": list(seeds), "steps": steps, "texts": TEXTS, "width": WIDTH, "runs": found, "expected": verdict}
        print(f"written to {_bench.write('bridge_garden', result, results_row).relative_to(_bench.ROOT)}")


if __name__ == "__main__":
    main()
