"""Claim check: SFT weighted by exp(return / beta) beats plain SFT on the same rollouts; and what a step costs.

A letter toy: the right answer to ``ab=`` is ``b``. A Llama of 80 thousand parameters is taught answers of which too few are right
(the reference). To 200 questions it gives 16 rollouts each, at most 3 turns with the feedback ``?`` in between, stopping at
success. On those, from the reference's weights: DRIFTTrainer (beta .1, gamma .9, "sequence") and SFTTrainer, 2 epochs, rate
1e-3, batches of 64, the same rows in the same order. Measured: how often the first answer, drawn at temperature 1, is right,
over all pairs of different letters; exactly, as the probability of the right letter.

Expected, written before measuring. A plain torch loop gave weighted .968, plain .868; an earlier prototype, one seed, .943 and
.751. So: weighted at least .93 and at least .05 above plain, for each of three seeds. Plain SFT is not expected to stay where
the reference was: a rollout that stops at success ends in a right answer. Also told: all three normalisations, and the effective
sample size. Cost: a step of DRIFTTrainer at most 1.05 times that of SFTTrainer, on rows of 64 tokens of a Llama of 1.5 million
parameters, in turn, median of the ratios of CPU time.

    python benchmarks/drift.py            # about 4 minutes on one thread
    python benchmarks/drift.py --quick    # one seed, fewer questions, writes nothing
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import string
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import datasets
import torch
import transformers
import trl
from _bench import ResultRow, interleave, ratios, summary, write
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from hfplug.trainers import (
    DRIFTConfig,
    DriftRolloutCollector,
    DRIFTTrainer,
    ModelGenerator,
    effective_sample_size,
    to_drift_dataset,
)

METHODS = ("drift",)

LETTERS = string.ascii_lowercase
SEEDS = (0, 1, 2)
LEAST, MARGIN, COST = 0.93, 0.05, 1.05
KINDS = ("sequence", "token", "weight")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
PAIRS = [(a, b) for a, b in itertools.product(LETTERS, LETTERS) if a != b]


def tokenizer() -> Any:
    """A letter is a token."""
    words = {"<pad>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate([*LETTERS, "=", "?"])}}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<pad>", padding_side="left"
    )
    made.chat_template = TEMPLATE
    return made


def llama(seed: int, hidden: int = 64, vocab: int = 30) -> Any:
    """A Llama of two layers."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).float()


def settings(folder: str, seed: int, **more: Any) -> dict[str, Any]:
    """What both trainers are given."""
    return {
        "output_dir": folder, "per_device_train_batch_size": 64, "learning_rate": 1e-3, "num_train_epochs": 2, "seed": seed,
        "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "activation_checkpointing": False, "dataloader_pin_memory": False, **more,
    }  # fmt: skip


def fit(kind: str, model: Any, rows: Sequence[dict[str, Any]], seed: int, **more: Any) -> Any:
    """Train on ``rows``: ``"plain"`` with SFTTrainer, else with DRIFTTrainer in that normalisation."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "plain":
            args, cls = trl.SFTConfig(**settings(folder, seed, **more)), trl.SFTTrainer
            rows = [{k: v for k, v in row.items() if k != "weight"} for row in rows]
        else:
            args, cls = DRIFTConfig(**settings(folder, seed, **more), drift_normalization=kind), DRIFTTrainer
        trainer = cls(model, args=args, train_dataset=datasets.Dataset.from_list(list(rows)), processing_class=tokenizer())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


def accuracy(model: Any) -> float:
    """Probability of the right first letter, over all pairs."""
    made = tokenizer()
    ids = torch.tensor([made(f"{a}{b}=")["input_ids"] for a, b in PAIRS])
    with torch.no_grad():
        chances = model.eval()(ids).logits[:, -1].softmax(-1)
    right = torch.tensor([made(pair[1])["input_ids"][0] for pair in PAIRS])
    return float(chances.gather(1, right[:, None]).mean())


def reference(seed: int) -> Any:
    """A model that answers right in about four of ten: 40 % of its lessons are right, the others any letter, in all turns."""
    draw = torch.Generator().manual_seed(seed)

    def letter() -> str:
        return LETTERS[int(torch.randint(26, (1,), generator=draw))]

    rows = []
    for _ in range(6000):
        a, b = PAIRS[int(torch.randint(len(PAIRS), (1,), generator=draw))]
        prompt = [{"role": "user", "content": f"{a}{b}="}]
        for _ in range(int(torch.randint(3, (1,), generator=draw))):  # as it will be asked after failures
            prompt += [{"role": "assistant", "content": letter()}, {"role": "user", "content": "?"}]
        answer = b if float(torch.rand(1, generator=draw)) < 0.4 else letter()
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]})
    model = llama(seed)
    fit("plain", model, rows, seed, num_train_epochs=6, learning_rate=2e-3)
    return model


def claim(seed: int, questions: int) -> dict[str, Any]:
    """One seed: accuracies of the reference and of the fits from it."""
    model = reference(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    chosen = [PAIRS[i] for i in torch.randperm(len(PAIRS), generator=draw)[:questions].tolist()]
    prompts = [{"prompt": f"{a}{b}=", "right": b} for a, b in chosen]
    collector = DriftRolloutCollector(
        ModelGenerator(model, tokenizer(), max_new_tokens=2, batch_size=1024), lambda answer, row: float(answer == row["right"]),
        n=16, max_turns=3, feedback="?", prompts_per_call=64, seed=seed,
    )  # fmt: skip
    rollouts = list(collector.collect(prompts))
    rows = to_drift_dataset(rollouts)
    weights = [row["weight"] for row in rows]
    found: dict[str, Any] = {
        "reference": accuracy(model),
        "rollouts": len(rows),
        "solved": statistics.mean(max(r["turn_rewards"]) for r in rollouts),
        "effective_sample_size": effective_sample_size(weights) / len(weights),
    }
    for kind in ("plain", *KINDS):
        start = llama(seed)  # no deepcopy: the fused head of TRL would go on calling the reference outside training
        start.load_state_dict(model.state_dict())
        found[kind] = accuracy(fit(kind, start, rows, seed).model)
    return found


def cost(turns: int) -> dict[str, Any]:
    """CPU time of a training of some steps, DRIFTTrainer's over SFTTrainer's."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 30, (8, 64), generator=draw).tolist()
    rows = [{"input_ids": row, "labels": [-100] * 16 + row[16:], "weight": 0.5 + i / 8} for i, row in enumerate(ids)]
    model = llama(0, hidden=320)
    more = {"per_device_train_batch_size": 8, "max_steps": 8, "learning_rate": 1e-5}
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Any] = {}
        for name in ("plain", *KINDS):
            own = {} if name == "plain" else {"drift_normalization": name}
            config, cls = (trl.SFTConfig, trl.SFTTrainer) if name == "plain" else (DRIFTConfig, DRIFTTrainer)
            given = [{k: v for k, v in r.items() if name != "plain" or k != "weight"} for r in rows]
            made[name] = cls(
                copy.deepcopy(model), args=config(**settings(folder, 0, **more), **own),
                train_dataset=datasets.Dataset.from_list(given), processing_class=tokenizer(),
            )  # fmt: skip
            made[name].remove_callback(transformers.PrinterCallback)
        times = interleave({name: trainer.train for name, trainer in made.items()}, repeats=turns)
    return {kind: ratios(times[kind].cpu, times["plain"].cpu) for kind in KINDS}


def results_row(result: dict[str, Any]) -> ResultRow:
    """What stands on the results page."""
    means, price = result["means"], result["cost"]["sequence"]
    met = result["claim_holds"] and result["cost_holds"]
    return ResultRow(
        f"first answers right: weighted at least {LEAST} and {MARGIN} above plain SFT, in every seed; a step at most {COST}",
        "above plain SFT on the same rollouts (the card's prototype: .968 against .868)",
        ", ".join(f"{name} {means[name]:.3f}" for name in ("reference", "plain", "sequence")) + f"; step {price['median']:.3f}",
        "reproduced" if met else "partly reproduced" if result["claim_holds"] else "not reproduced",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, fewer questions and turns; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    found = {seed: claim(seed, 60 if quick else 200) for seed in (SEEDS[:1] if quick else SEEDS)}
    for seed, one in found.items():
        print(f"seed {seed}: " + ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in one.items()))
    holds = all(one["sequence"] >= LEAST and one["sequence"] - one["plain"] >= MARGIN for one in found.values())
    means = {kind: statistics.mean(one[kind] for one in found.values()) for kind in ("reference", "plain", *KINDS)}
    print("means: " + ", ".join(f"{kind} {value:.3f}" for kind, value in means.items()))
    print(f"weighted >= {LEAST} and >= plain + {MARGIN} for each seed: {'holds' if holds else 'DOES NOT HOLD'}")
    prices = cost(3 if quick else 12)
    for kind, price in prices.items():
        print(f"step, {kind}: {price['median']:.3f} times SFTTrainer's (from {price['min']:.3f} to {price['max']:.3f})")
    cheap = prices["sequence"]["median"] <= COST
    print(f"at most {COST} times: {'holds' if cheap else 'DOES NOT HOLD'}")
    if not quick:
        result = {
            "expected": {"least": LEAST, "margin": MARGIN, "cost": COST}, "seeds": found, "means": means,
            "accuracy": {kind: summary([one[kind] for one in found.values()]) for kind in ("reference", "plain", *KINDS)},
            "claim_holds": holds, "cost": prices, "cost_holds": cheap,
        }  # fmt: skip
        print(write("drift", result, results_row))


if __name__ == "__main__":
    main()
