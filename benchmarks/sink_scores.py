"""What sink scores cost: memory against ``output_attentions=True``, time against plain SDPA.

Expected, written before measuring: a whole map is heads x T^2 numbers per layer and all layers are kept, the scores are
heads x T: at 4096 tokens the peak above the model must be at least 10 times lower with ``record(model)``. SDPA does two products
and a softmax over the causal half; scoring afterwards does one product and one softmax more, so ``record()`` should cost 1.7 to 2
times the SDPA of an attention call, the one pass of ``attn_implementation="sink_scores"`` 1.2 to 1.5 times. In a whole forward
the linear layers dilute both. Target: at most 1.5 times SDPA at 4096 tokens.

Run by ``python benchmarks/sink_scores.py``; writes results/sink_scores.json. One thread, about four minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench import ResultRow, interleave, ratios, summary, write

METHODS = ("sink_scores",)

HEADS, KV_HEADS, DIM, TOKENS = 9, 3, 64, 4096  # SmolLM2-135M's attention
MODES = ("sdpa", "record", "one pass", "output_attentions")


def tiny_smollm2(attn: str, layers: int) -> Any:
    """A model of SmolLM2-135M's shape with fewer layers and drawn weights: what they are does not matter here."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=2 * TOKENS, attn_implementation=attn,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaModel(config).eval()


def forward_of(mode: str, layers: int, tokens: int) -> Callable[[], Any]:
    """One forward without gradients in a mode; returns the scores, the maps or nothing."""
    from hfplug.kernels.sink_scores import record

    attn = {"one pass": "sink_scores", "output_attentions": "eager"}.get(mode, "sdpa")
    model = tiny_smollm2(attn, layers)
    ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(1))

    def run() -> Any:
        with torch.no_grad():
            if mode in ("record", "one pass"):
                with record(model) as recorded:
                    model(ids, use_cache=False)
                return [recorded.scores(layer) for layer in recorded.last.layers]
            return model(ids, use_cache=False, output_attentions=mode == "output_attentions").attentions

    return run


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak(mode: str, layers: int) -> int:
    """Bytes the process takes at most in one forward, above what it held before."""
    run = forward_of(mode, layers, TOKENS)
    forward_of(mode, 1, 64)()  # what a first call allocates for good
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    kept = run()
    found = status("VmHWM") - before
    del kept
    return found


def memory(layers: int) -> dict[str, Any]:
    """Peaks of all modes, each in a process of its own."""
    found: dict[str, int] = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--peak", mode, "--layers", str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[mode] = json.loads(done.stdout.splitlines()[-1])
    scores = [forward_of("record", 2, 256)(), forward_of("output_attentions", 2, 256)()]
    own = scores[1][0].sum(dim=2) / torch.arange(256, 0, -1)
    assert (scores[0][0] - own).abs().max() < 1e-5, "the two do not measure the same"
    return {
        "layers": layers, "tokens": TOKENS, "bytes": found,
        "output_attentions / record": found["output_attentions"] / found["record"],
        "output_attentions / one pass": found["output_attentions"] / found["one pass"],
        "kept by output_attentions": 4 * layers * HEADS * TOKENS**2,
    }  # fmt: skip


def attention_times(tokens: int, repeats: int) -> dict[str, Any]:
    """One attention call: SDPA, SDPA and then the scores, both in one pass."""
    from hfplug.sinks import attend_and_score, sink_scores

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, tokens, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))

    def sdpa() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def both() -> Any:
        return sdpa(), sink_scores(query, key)

    runs = {"sdpa": sdpa, "sdpa, then scores": both, "one pass": lambda: attend_and_score(query, key, value)}
    with torch.no_grad():
        times = interleave(runs, repeats, warmup=2)
    return {
        "seconds of CPU time": {name: summary(t.cpu) for name, t in times.items()},
        "ratio to sdpa": {name: ratios(t.cpu, times["sdpa"].cpu) for name, t in times.items() if name != "sdpa"},
    }


def forward_times(layers: int, repeats: int) -> dict[str, Any]:
    """A whole forward at 4096 tokens."""
    times = interleave({mode: forward_of(mode, layers, TOKENS) for mode in MODES[:3]}, repeats)
    return {
        "layers": layers, "tokens": TOKENS,
        "seconds of CPU time": {name: summary(t.cpu) for name, t in times.items()},
        "ratio to sdpa": {name: ratios(t.cpu, times["sdpa"].cpu) for name, t in times.items() if name != "sdpa"},
    }  # fmt: skip


def results_row(result: dict[str, Any]) -> ResultRow:
    """What stands on the results page."""
    calls, targets = result["attention call"]["4096"]["ratio to sdpa"], result["targets"]
    return ResultRow(
        "sink scores without the attention map: memory a tenth, time at most 1.5 of SDPA at 4096 tokens",
        "none; limits of our own",
        f"memory 1/{result['memory']['output_attentions / record']:.1f}; one pass {calls['one pass']['median']:.2f}, "
        f"scored afterwards {calls['sdpa, then scores']['median']:.2f}",
        "target met" if all(targets.values()) else "target missed",
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak", choices=MODES)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print(peak(arguments.peak, arguments.layers))
        return
    result = {
        "attention call": {str(tokens): attention_times(tokens, arguments.repeats) for tokens in (1024, TOKENS, 8192)},
        "forward": forward_times(arguments.layers, arguments.repeats),
        "memory": memory(arguments.layers),
    }
    for tokens, found in result["attention call"].items():
        told = (f"{name} {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})" for name, r in found["ratio to sdpa"].items())
        print(f"attention call, {tokens} tokens, times SDPA: {', '.join(told)}")
    line = ", ".join(f"{name} {r['median']:.2f}" for name, r in result["forward"]["ratio to sdpa"].items())
    print(f"whole forward, {TOKENS} tokens, times SDPA: {line}")
    print("peak memory above the model, MiB:", {name: n // 2**20 for name, n in result["memory"]["bytes"].items()})
    less = result["memory"]["output_attentions / record"]
    print(f"output_attentions takes {less:.1f} times the memory of record()")
    one, two = (result["attention call"][str(TOKENS)]["ratio to sdpa"][n]["median"] for n in ("one pass", "sdpa, then scores"))
    result["targets"] = {
        "memory: at least 10": less >= 10,
        "attention call, one pass: at most 1.5": one <= 1.5,
        "attention call, record: at most 1.5": two <= 1.5,
        "whole forward, one pass: at most 1.5": result["forward"]["ratio to sdpa"]["one pass"]["median"] <= 1.5,
        "whole forward, record: at most 1.5": result["forward"]["ratio to sdpa"]["record"]["median"] <= 1.5,
    }
    print("targets:", result["targets"])
    print("wrote", write("sink_scores", result, results_row))


if __name__ == "__main__":
    main()
