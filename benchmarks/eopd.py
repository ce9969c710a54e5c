"""EOPD against reverse-KL distillation: what becomes of the teacher's diversity, and what a step costs.

Learning. A language in which half of the words have one successor and half have eight equal ones; the teacher is its exact
table, the student a Llama of two layers and width 16. On-policy for 300 steps, three seeds: TRL's ``DistillationTrainer`` at
``beta=1`` and ``EOPDTrainer`` at the paper's tau .8, alpha 1, k 16, from the same student on the same prompts.

Expected before measuring (the abstract's claims): on words with eight successors the student's entropy is nearer to
log 8 = 2.08 and forward KL lower with EOPD, and the probability of the right word after words with one successor is no worse
(within .02).

Cost. SmolLM2-135M as teacher, its first 15 layers as student, all weights trained, every token gated (the dearest case); loss
and backward of one batch, sampling left out (with it the ratio is nearer to 1). Expected: the tiles do once what TRL's loss
does, plus entropy and top k, so at most 1.10 of the stock step; peak memory at most that of the stock step, since four tiles
are alive where TRL's torch path has about eight.

    python benchmarks/eopd.py            # about 4 minutes of one core
    python benchmarks/eopd.py --quick    # one seed, few steps: that it runs; writes nothing
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _bench
import _markov
import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfplug.models import resolve_model
from hfplug.seams.trainer import stock_config, stock_trainer
from hfplug.testing.models import VOCAB, tiny_tokenizer
from hfplug.trainers import EOPDConfig, EOPDTrainer

METHODS = ("eopd",)

SEEDS, STEPS, BATCH, LENGTH, RATE = (0, 1, 2), 300, 32, 8, 5e-3
BOUND_STEP, BOUND_MEMORY = 1.10, 1.0
PROMPT, COMPLETION, ROWS = 32, 128, 2
SHARED: dict[str, Any] = {
    "bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no", "activation_checkpointing": False,
    "disable_tqdm": True, "logging_steps": 1000, "lr_scheduler_type": "cosine",
}  # fmt: skip


def arm(name: str, folder: str, **settings: Any) -> tuple[Any, Any]:
    """Trainer class and config of an arm."""
    if name == "eopd":
        return EOPDTrainer, EOPDConfig(folder, **SHARED, **settings)
    return stock_trainer("distill"), stock_config("distill")(folder, **SHARED, **settings)


def learn(name: str, start: Any, teacher: Any, seed: int, steps: int) -> Any:
    """A student trained in one arm."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(_markov.FIRST, VOCAB, (steps * BATCH,), generator=draw).tolist()
    with tempfile.TemporaryDirectory() as folder:
        cls, config = arm(
            name, folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, max_completion_length=LENGTH,
            seed=seed,
        )  # fmt: skip
        prompts = datasets.Dataset.from_list([{"prompt": f"w{word}"} for word in words])
        trainer = cls(
            copy.deepcopy(start), teacher_model=teacher, args=config, train_dataset=prompts, processing_class=tiny_tokenizer()
        )
        trainer.train()
    return trainer.model


def learning(seeds: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Both arms of all seeds."""
    found: dict[str, list[dict[str, float]]] = {"reverse_kl": [], "eopd": []}
    for seed in seeds:
        probabilities, many = _markov.table(seed)
        teacher, start = _markov.teacher(probabilities), _markov.student(seed)
        for name in found if seed % 2 == 0 else reversed(found):
            model = learn(name, start, teacher, seed, steps)
            found[name].append(_markov.compare(model, probabilities, many, seed))
    keys = ("entropy_many", "forward_kl_many", "right_one", "coverage", "distinct", "legal")
    for name, runs in found.items():
        print(f"{name:>10}: " + "  ".join(f"{k} {_mean(runs, k):.3f}" for k in keys))
    pairs = list(zip(found["eopd"], found["reverse_kl"], strict=True))
    target = torch.tensor(_markov.BRANCHES).log().item()
    verdict = {
        "entropy nearer to log 8, every seed": all(
            abs(a["entropy_many"] - target) < abs(b["entropy_many"] - target) for a, b in pairs
        ),
        "forward KL on eight successors lower, every seed": all(a["forward_kl_many"] < b["forward_kl_many"] for a, b in pairs),
        "one successor no worse by .02, every seed": all(a["right_one"] >= b["right_one"] - 0.02 for a, b in pairs),
    }
    print("\n".join(f"{'yes' if held else 'NO '}  {claim}" for claim, held in verdict.items()))
    return {"seeds": list(seeds), "steps": steps, "runs": found, "expected": verdict}


def _mean(runs: list[dict[str, float]], key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)


def step_of(name: str, student: Any, teacher: Any, tokenizer: Any, folder: str) -> Callable[[], None]:
    """A function that does the loss and the backward of one fixed batch."""
    settings: dict[str, Any] = {"per_device_train_batch_size": ROWS, "max_completion_length": COMPLETION}
    if name == "eopd":
        settings["eopd_threshold"] = 0.0
    cls, config = arm(name, folder, **settings)
    data = datasets.Dataset.from_list([{"prompt": "x"}] * ROWS)
    trainer = cls(student, teacher_model=teacher, args=config, train_dataset=data, processing_class=tokenizer)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40000, (ROWS, PROMPT + COMPLETION), generator=draw)
    batch = {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:], "completion_mask": torch.ones(ROWS, COMPLETION, dtype=torch.long),
        "num_items_in_batch": torch.tensor(float(ROWS * COMPLETION)),
    }  # fmt: skip
    trainer.model.train()

    def run() -> None:
        trainer.compute_loss(trainer.model, dict(batch)).backward()
        trainer.model.zero_grad()

    return run


def peak(run: Callable[[], None]) -> int:
    """Most bytes of tensors alive above those before, by the profiler's record of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def cost(repeats: int, layers: int) -> dict[str, Any]:
    """Time and peak memory of a step of both trainers, in turn."""
    source = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    teacher = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    student = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, num_hidden_layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        # One student for both: a step changes no weight.
        runs = {name: step_of(name, student, teacher, tokenizer, folder) for name in ("reverse_kl", "eopd")}
        times = _bench.interleave(runs, repeats)
        peaks = {name: peak(run) for name, run in runs.items()}
    wall = _bench.ratios(times["eopd"].wall, times["reverse_kl"].wall)
    cpu = _bench.ratios(times["eopd"].cpu, times["reverse_kl"].cpu)
    memory = peaks["eopd"] / peaks["reverse_kl"]
    print(
        f"step of {ROWS * COMPLETION} tokens, all gated: x {cpu['median']:.3f} CPU time ({cpu['min']:.3f} to {cpu['max']:.3f}), "
        f"x {wall['median']:.3f} on the wall, bound {BOUND_STEP}; peak memory x {memory:.3f} "
        f"({peaks['eopd'] / 2**20:.0f} against {peaks['reverse_kl'] / 2**20:.0f} MiB), bound {BOUND_MEMORY}"
    )
    return {
        "model": "SmolLM2-135M", "student_layers": layers, "tokens": ROWS * COMPLETION, "ratio_cpu": cpu, "ratio_wall": wall,
        "peak_bytes": peaks, "ratio_memory": memory, "bounds": {"step": BOUND_STEP, "memory": BOUND_MEMORY},
        "within": {"step": cpu["median"] <= BOUND_STEP, "memory": memory <= BOUND_MEMORY},
    }  # fmt: skip


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    runs, cost = result["learning"]["runs"], result["cost"]
    told = {
        n: (_bench.spread([r["entropy_many"] for r in f]), _bench.spread([r["forward_kl_many"] for r in f]))
        for n, f in runs.items()
    }
    held = all(result["learning"]["expected"].values())
    return _bench.ResultRow(
        "EOPD keeps the teacher's diversity where its entropy is high, and loses nothing elsewhere; step at most "
        f"{BOUND_STEP}, peak memory at most {BOUND_MEMORY} of reverse-KL distillation",
        "more diverse and better pass@k than on-policy reverse KL",
        "; ".join(f"{n}: entropy {e} (teacher 2.079), forward KL {k}" for n, (e, k) in told.items())
        + f"; step {cost['ratio_cpu']['median']:.3f}, memory {cost['ratio_memory']:.3f}",
        "reproduced" if held and all(cost["within"].values()) else "partly reproduced" if held else "not reproduced",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    quick = options.quick
    result = {
        "learning": learning(SEEDS[:1] if quick else SEEDS, 20 if quick else STEPS),
        "cost": cost(*((1, 2) if quick else (5, 15))),
    }
    print(f"{time.process_time() - began:.0f} s of CPU time")
    if not quick:
        print(f"written to {_bench.write('eopd', result, results_row).relative_to(_bench.ROOT)}")


if __name__ == "__main__":
    main()
