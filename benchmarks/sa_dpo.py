"""Claim check: a margin that follows semantic distance leaves near-synonyms alone; and what a step of SA-DPO costs.

A question is two words, its answer is told by the first; every answer has two words that mean the same. A Llama of 15 thousand
parameters is taught answers of which 60 % are right, either word equally often: the reference. Preferences over half of the
questions: 70 % a right word against a wrong one (distance 1), 30 % the two right words in random order (distance .02), of 512
pairs. Four losses from the reference's weights, same batches, 160 steps of 32 pairs, beta .1, rate 1e-3: DPO; SA-DPO with the
same margin for all pairs (logistic), with the structure margin (logistic), and with the structure margin and the poly surrogate;
gamma_max .5, tau .25. Measured over the questions left out, exactly: the mean of |Delta| between two right words, how often
Delta is above 0 between a right and a wrong word, KL to the reference at the answer, probability of a right word.

Expected, written before measuring, in each of three seeds: structure below constant in |Delta| on synonyms and in KL, and not
below it in accuracy. Against plain DPO, which asks for no margin at all, no gain on synonyms: at distance .02 the structure
margin asks for next to none either. The abstract's 58.5 % of comparisons won on UltraFeedback are out of reach here.
A pilot on seed 7 fixed that the script runs through, nothing else. Cost: a step of SADPOTrainer at most 1.05 of DPOTrainer's.

    python benchmarks/sa_dpo.py            # about 4 minutes on one thread
    python benchmarks/sa_dpo.py --quick    # one seed, few steps; writes nothing
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import copy
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import _bench
import datasets
import torch
import transformers
import trl
from torch.nn.functional import cross_entropy

from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers import SADPOConfig, SADPOTrainer

METHODS = ("sa_dpo",)
SEEDS, STEPS, PAIRS, BATCH, BETA, RATE, GAMMA = (0, 1, 2), 160, 512, 32, 0.1, 1e-3, 0.5
BOUND = 1.05
KINDS, FIRST, SECOND, RIGHT = 16, 24, 44, 0.6  # answers; their first and second words; share of right ones in the reference
ARMS: dict[str, dict[str, Any]] = {
    "DPO": {},
    "constant": {"sa_dpo_margin": "constant"},
    "structure": {"sa_dpo_margin": "structure"},
    "structure, poly": {"sa_dpo_margin": "structure", "sa_dpo_surrogate": "poly"},
}
SAMENESS = 0.02


def questions(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Half of the pairs of words to train on, the others."""
    every = [(a, b) for a in range(KINDS) for b in range(KINDS)]
    random.Random(seed).shuffle(every)
    return every[: len(every) // 2], every[len(every) // 2 :]


def text(question: tuple[int, int]) -> str:
    """The prompt of a question."""
    return f"w{3 + question[0]} w{3 + question[1]} "


def ids(asked: list[tuple[int, int]]) -> torch.Tensor:
    """Prompts as tokens ``(questions, 2)``."""
    return torch.tensor([[3 + a, 3 + b] for a, b in asked])


def reference(seed: int, steps: int) -> Any:
    """A model that gives a right word for about ``RIGHT`` of all questions."""
    model, draw = tiny_llama(seed), random.Random(seed)
    every = [question for half in questions(seed) for question in half]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        asked = [draw.choice(every) for _ in range(64)]
        kinds = [a if draw.random() < RIGHT else draw.randrange(KINDS) for a, _ in asked]
        target = torch.tensor([draw.choice((FIRST, SECOND)) + kind for kind in kinds])
        loss = cross_entropy(model(ids(asked)).logits[:, -1], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def preferences(seed: int, count: int) -> datasets.Dataset:
    """Pairs over the questions to train on, with their distance."""
    draw, asked = random.Random(seed + 100), questions(seed)[0]
    rows = []
    for i in range(count):
        question = draw.choice(asked)
        right = [f"w{FIRST + question[0]}", f"w{SECOND + question[0]}"]
        draw.shuffle(right)
        if i % 10 < 7:
            wrong = draw.choice([k for k in range(KINDS) if k != question[0]])
            row = {"chosen": right[0], "rejected": f"w{draw.choice((FIRST, SECOND)) + wrong}", "semantic_distance": 1.0}
        else:
            row = {"chosen": right[0], "rejected": right[1], "semantic_distance": SAMENESS}
        rows.append({"prompt": text(question), **row})
    return datasets.Dataset.from_list(rows).shuffle(seed=seed)


def trainer(arm: str, model: Any, base: Any, data: Any, folder: str, seed: int, steps: int, batch: int = BATCH) -> Any:
    """The trainer of an arm."""
    settings = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": RATE, "beta": BETA,
        "lr_scheduler_type": "constant", "seed": seed, "report_to": "none", "save_strategy": "no", "bf16": False,
        "logging_steps": 50, "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    own = ARMS[arm]
    config = SADPOConfig(**settings, sa_dpo_gamma_max=GAMMA, sa_dpo_tau=0.25, **own) if own else trl.DPOConfig(**settings)
    cls = SADPOTrainer if own else trl.DPOTrainer
    made = cls(model, base, config, train_dataset=data, processing_class=tiny_tokenizer())
    made.remove_callback(transformers.PrinterCallback)
    return made


@torch.no_grad()
def measured(model: Any, base: Any, seed: int) -> dict[str, float]:
    """Over the questions left out."""
    asked = questions(seed)[1]
    new, old = (m.eval()(ids(asked)).logits[:, -1].double().log_softmax(-1) for m in (model, base))
    ratio, kind = new - old, torch.tensor([a for a, _ in asked])
    rows = torch.arange(len(asked))
    one, two = ratio[rows, FIRST + kind], ratio[rows, SECOND + kind]
    others = torch.tensor([[k for k in range(KINDS) if k != a] for a, _ in asked])
    wrong = torch.cat([ratio.gather(1, FIRST + others), ratio.gather(1, SECOND + others)], 1)
    right = torch.stack([one, two], 1)
    return {
        "synonyms": float((one - two).abs().mean()),
        "accuracy": float((right[:, :, None] > wrong[:, None, :]).double().mean()),
        "kl": float((new.exp() * ratio).sum(-1).mean()),
        "right": float((new[rows, FIRST + kind].exp() + new[rows, SECOND + kind].exp()).mean()),
    }


def claim(seed: int, steps: int, taught: int) -> dict[str, dict[str, float]]:
    """All arms of one seed."""
    base, data, found = reference(seed, taught), preferences(seed, PAIRS), {}
    found["before"] = measured(base, base, seed)
    for arm in ARMS:
        model = copy.deepcopy(base)
        with tempfile.TemporaryDirectory() as folder:
            trainer(arm, model, copy.deepcopy(base), data, folder, seed, steps).train()
        found[arm] = measured(model, base, seed)
    return found


def cost(repeats: int) -> dict[str, Any]:
    """A step (loss, backward) of SA-DPO over one of DPO, on one batch of a wider model."""
    data = preferences(0, 64)
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[], Any]] = {}
        for arm in ("DPO", "structure, poly"):
            made = trainer(arm, tiny_llama(0, **shape), tiny_llama(1, **shape), data, folder, 0, 1, 32)
            inputs = made._prepare_inputs(next(iter(made.get_train_dataloader())))

            def step(made: Any = made, inputs: Any = inputs) -> None:
                made.model.train()
                made.compute_loss(made.model, dict(inputs)).backward()
                made.model.zero_grad()

            runs[arm] = step
        times = _bench.interleave(runs, repeats)
    return {
        "cpu": _bench.ratios(times["structure, poly"].cpu, times["DPO"].cpu),
        "wall": _bench.ratios(times["structure, poly"].wall, times["DPO"].wall),
    }


def expected(runs: list[dict[str, dict[str, float]]]) -> dict[str, bool]:
    """What was written down before, over all seeds."""
    return {
        "structure below constant: |Delta| on synonyms": all(
            r["structure"]["synonyms"] < r["constant"]["synonyms"] for r in runs
        ),
        "structure below constant: KL": all(r["structure"]["kl"] < r["constant"]["kl"] for r in runs),
        "structure not below constant: accuracy": all(r["structure"]["accuracy"] >= r["constant"]["accuracy"] for r in runs),
    }


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    runs, said = result["runs"], result["expected"]
    parts = []
    for arm in ARMS:
        moved, kl, won = ([r[arm][key] for r in runs] for key in ("synonyms", "kl", "accuracy"))
        means = f"KL {statistics.mean(kl):.3f}, accuracy {statistics.mean(won):.3f}"
        parts.append(f"{arm}: |Delta| {_bench.spread(moved)}, {means}")
    told = "; ".join(parts)
    held = sum(said.values())
    return _bench.ResultRow(
        "a margin that follows distance moves synonyms less than a constant one, at no less accuracy and less KL; a step at most "
        f"{BOUND} of DPO's",
        "58.5 % of comparisons won against DPO and SimPO on UltraFeedback (abstract): out of reach here",
        f"{told}; step {result['cost']['cpu']['median']:.3f}",
        "reproduced" if held == len(said) and result["cost_met"] else "partly reproduced" if held else "not reproduced",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    runs = []
    for seed in (7,) if quick else SEEDS:
        runs.append(claim(seed, 10 if quick else STEPS, 60 if quick else 400))
        for arm, found in runs[-1].items():
            print(f"seed {seed} {arm:16s} " + "  ".join(f"{k} {v:.4f}" for k, v in found.items()), flush=True)
    said = expected(runs)
    print("\n".join(f"{'yes' if held else 'NO '}  {what}, every seed" for what, held in said.items()))
    price = cost(3 if quick else 15)
    met = price["cpu"]["median"] <= BOUND
    print(
        f"step: {price['cpu']['median']:.3f} of DPO's CPU time, {price['wall']['median']:.3f} on the wall; at most {BOUND}: {met}"
    )
    if not quick:
        result = {
            "seeds": SEEDS, "steps": STEPS, "pairs": PAIRS, "beta": BETA, "rate": RATE, "gamma_max": GAMMA, "arms": ARMS,
            "runs": runs, "expected": said, "cost": price, "cost_met": met,
        }  # fmt: skip
        print(_bench.write("sa_dpo", result, results_row))


if __name__ == "__main__":
    main()
