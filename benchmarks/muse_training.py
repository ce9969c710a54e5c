"""Training with MuSe on against the same training with exact attention: a fine-tune of SmolLM2-135M and tiny models from scratch.

finetune: LoRA in fp32 on every projection of the model in bf16, 12 steps of one sequence of 4096 tokens of Python's help topics,
block 512; afterwards 3 held-out sequences of the same text, each model with MuSe and with exact attention, in fp32.

tiny: Llama of 4 layers, 128 wide, bytes as tokens, sequences of 2048 bytes of the standard library's sources and the help
topics, block 128, 16 clusters; 3 seeds, same data and order; afterwards held-out sequences, each model with its own attention
and with exact attention. A window of 256 tokens + 4 (what MuSe sees exactly there, and nothing far) is trained beside it: where
that is no worse than exact attention, the far part cannot have mattered and the comparison says nothing about it.

Expected before measuring: fine-tuned with MuSe, the loss with MuSe falls by more than that of the model fine-tuned with exact
attention, and most of the gap that MuSe opens without training closes; evaluated with exact attention it stays within .01 of
the exact fine-tune. The tiny models end within a standard deviation over seeds of one another, the window's too, for 100 steps
teach little that lies further back than 256 bytes.

    python benchmarks/muse_training.py                    # about 35 minutes on one thread
    python benchmarks/muse_training.py --stage tiny       # or finetune
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, stdev
from typing import Any

import peft
import torch
import transformers
from _bench import ROOT, ResultRow, provenance, write
from muse_quality import Window, load, pieces, text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hfplug.kernels.muse import configure
from hfplug.ledger import Ledger
from hfplug.seams.attention import register

METHODS = ("muse",)

PATH = ROOT / "benchmarks" / "results" / "muse_training.json"

# finetune
LENGTH, STEPS, RATE, RANK, HELD = 4096, 12, 5e-4, 8, 3
FINE = {"block": 512, "clusters": 32, "min_length": 0}
# tiny
SEEDS, TINY_LENGTH, TINY_STEPS, TINY_RATE, TINY_HELD = (0, 1, 2), 2048, 100, 3e-3, 12
TINY = {"block": 128, "clusters": 16, "query_clusters": 8, "min_length": 0}
WINDOW = 256


def keep(stage: str, result: dict[str, Any]) -> None:
    """Put a stage's result beside the other's, with where it comes from."""
    every = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    every = {name: value for name, value in every.items() if name != "provenance"}
    every |= {"claim": str(__doc__).splitlines()[0], stage: {**result, "provenance": provenance()}}
    write("muse_training", every, results_row)


def loss_of(model: Any, ids: Tensor, chunk: int = 1024) -> Tensor:
    """Mean loss of ``ids`` ``(batch, tokens)``; logits in chunks that the backward makes again."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

    def part(h: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(model.lm_head(h).float(), t, reduction="sum")

    targets = ids[:, 1:].flatten()
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return sum(checkpoint(part, h, t, use_reentrant=False) for h, t in parts) / len(targets)  # type: ignore[return-value]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients, in evaluation mode, and back."""
    was = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was)


def held_out_loss(model: Any, rows: list[Tensor]) -> float:
    """Mean loss over sequences of equal length."""
    with evaluating(model):
        return mean(float(loss_of(model, row[None])) for row in rows)


def train(model: Any, rows: list[Tensor], rate: float, batch: int) -> tuple[list[float], float]:
    """One pass of AdamW, cosine from ``rate`` to 0 after a tenth of warm-up; losses of the steps, CPU seconds per step."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(rows) // batch
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, max(1, steps // 10), steps)
    losses, began = [], time.process_time()
    model.train()
    for step in range(steps):
        ids = torch.stack(rows[step * batch : (step + 1) * batch])
        loss = loss_of(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, (time.process_time() - began) / steps


# -- fine-tune ---------------------------------------------------------------------------------------------------------


def finetune() -> None:
    """Base, fine-tuned with exact attention, fine-tuned with MuSe; each measured with both."""
    every = pieces("doc", LENGTH)
    rows, held = every[:STEPS], every[STEPS : STEPS + HELD]
    result: dict[str, Any] = {
        "setting": {"length": LENGTH, "steps": STEPS, "rate": RATE, "rank": RANK, "held out": HELD, "muse": FINE}, "models": {},
    }  # fmt: skip
    for trained in ("base", "sdpa", "muse"):
        model, found = load(torch.bfloat16), {}
        configure(model, **FINE)
        if trained != "base":
            torch.manual_seed(0)
            config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, config).base_model.model
            model.set_attn_implementation(trained)
            found["curve"], found["cpu seconds per step"] = train(model, rows, RATE, 1)
        model.float()
        for which in ("sdpa", "muse"):
            model.set_attn_implementation(which)
            found[f"loss with {which}"] = held_out_loss(model, held)
        result["models"][trained] = found
        print(trained, {k: v for k, v in found.items() if k != "curve"}, flush=True)
        keep("finetune", result)


# -- from scratch ------------------------------------------------------------------------------------------------------


def tiny_model(seed: int) -> Any:
    """Llama over bytes, 0.8 M parameters."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TINY_LENGTH, tie_word_embeddings=True,
    ))  # fmt: skip


def tiny() -> None:
    """Every seed with every attention."""
    data = torch.frombuffer(bytearray((text("code") + text("doc")).encode()), dtype=torch.uint8).long()
    chunks = list(data.split(TINY_LENGTH))[:-1]
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(7)).tolist()
    held, pool = [chunks[i] for i in order[:TINY_HELD]], [chunks[i] for i in order[TINY_HELD:]]
    runs: dict[str, list[dict[str, Any]]] = {"sdpa": [], "muse": [], "window": []}
    setting = {
        "length": TINY_LENGTH, "steps": TINY_STEPS, "rate": TINY_RATE, "held out": TINY_HELD, "muse": TINY, "window": WINDOW,
        "uniform loss": math.log(256),
    }  # fmt: skip
    with Ledger("tiny") as ledger:
        register(ledger, "window", Window(WINDOW))
        for seed in SEEDS:
            shuffled = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
            rows = [pool[i] for i in shuffled[:TINY_STEPS]]
            assert len(rows) == TINY_STEPS
            for which, found in runs.items():
                model = tiny_model(seed)
                configure(model, **TINY)
                model.set_attn_implementation(which)
                curve, seconds = train(model, rows, TINY_RATE, 1)
                row: dict[str, Any] = {"curve": curve, "cpu seconds per step": seconds, "own": held_out_loss(model, held)}
                model.set_attn_implementation("sdpa")
                row["with exact attention"] = held_out_loss(model, held)
                found.append(row)
                print(seed, which, {k: round(v, 4) for k, v in row.items() if k != "curve"}, flush=True)
            keep("tiny", {"setting": setting, "runs": runs, **compared(runs)})
    for name, gap in compared(runs)["differences"].items():
        print(f"{name}: {gap['mean']:+.4f} (sd {gap['sd']:.4f})")


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Differences to exact attention over seeds, and the spread of exact attention itself."""
    gaps: dict[str, Any] = {}
    for name in ("muse", "window"):
        for how in ("own", "with exact attention"):
            each = [a[how] - b["own"] for a, b in zip(runs[name], runs["sdpa"], strict=True)]
            gaps[f"{name}, evaluated {how}, minus exact"] = {"mean": mean(each), "sd": spread(each), "values": each}
    return {"differences": gaps, "sd of exact over seeds": spread([r["own"] for r in runs["sdpa"]])}


def spread(values: list[float]) -> float:
    """Standard deviation; nan of one value."""
    return stdev(values) if len(values) > 1 else math.nan


def results_row(result: dict[str, Any]) -> ResultRow | None:
    """What stands on the results page."""
    if not {"tiny", "finetune"} <= set(result):
        return None  # one stage has not run yet
    models, gap = result["finetune"]["models"], result["tiny"]["differences"]["muse, evaluated own, minus exact"]
    return ResultRow(
        "training with MuSe closes the gap it opens, and costs exact attention nothing",
        "trains as well as exact attention (abstract)",
        f"loss under MuSe {models['base']['loss with muse']:.3f} before and {models['muse']['loss with muse']:.3f} after tuning, "
        f"exact fine-tune {models['sdpa']['loss with muse']:.3f} under MuSe and {models['sdpa']['loss with sdpa']:.3f} exactly; "
        f"from scratch minus exact {gap['mean']:+.3f} (sd {gap['sd']:.3f})",
        "measured",
    )


def main() -> None:
    """The stages asked for."""
    stages = {"finetune": finetune, "tiny": tiny}
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--stage", nargs="*", choices=[*stages], default=[*stages])
    asked = parser.parse_args().stage
    torch.set_num_threads(1)
    for name, stage in stages.items():
        if name in asked:
            stage()


if __name__ == "__main__":
    main()
