"""MuSe against exact attention: time, error of outputs and gradients, memory; and against other approximations at equal cost.

Expected before measuring (one thread, fp32, ratios to torch's default SDPA): on synthetic topics at 32k tokens at least 3 times
as fast forward and 2.5 times forward and backward at a relative squared error of at most .01; at 8k real queries and keys (nine
heads on three) with 32 clusters at least 1.5 times forward; peak memory at most 1.2 times SDPA's. Gradients of keys: the worst.
Keys in spatial blocks, and centroids without the tilt, should be several times worse at the same cost.

Relative squared error: ``||o - o*||^2 / ||o*||^2`` over all heads and positions. A ratio above 1 means that MuSe is faster; CPU
time of this process is compared beside the wall, because other jobs disturb it less.

    python benchmarks/muse_speed.py                 # everything
    python benchmarks/muse_speed.py --part real     # one of: synthetic, threads, real, memory, curve, window
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _bench import ROOT, interleave, summary, write
from torch import Tensor

from hfplug.kernels.muse import muse, primitives, scheme
from hfplug.kernels.muse.scheme import Setting, units

DIM, SCALE = 64, 64**-0.5
SETTINGS = {
    "speed (32 clusters)": {"clusters": 32},
    "default (64 clusters)": {},
    "quality (128 clusters)": {"clusters": 128},
    "default, retrieve 2": {"retrieve": 2},
    "default, 3 Lloyd steps": {"iterations": 3},
}
TIMED = (5, 17)
LAYERS = (0, 5, 7, 11, 17, 18, 20, 23, 29)  # of SmolLM2: evenly spaced ones, and the three worst (7, 18, 20)


def setting(clusters: int = 64, query_clusters: int = 32, block: int = 1024, retrieve: int = 0, iterations: int = 2) -> Setting:
    """The numbers of a run; defaults are those of ``MuSeConfig``."""
    return Setting(clusters, query_clusters, block, retrieve, iterations, False, SCALE)


def run(q: Tensor, k: Tensor, v: Tensor, s: Setting) -> Tensor:
    """MuSe."""
    return muse(q, k, v, None, s.clusters, s.query_clusters, s.block, s.retrieve, s.iterations, s.leaky, s.scale)[0]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)


def topical(n: int, seed: int = 0, topics: int = 64, gain: float = 4.0, noise: float = 0.5, stay: float = 0.9) -> list[Tensor]:
    """Tokens that keep a topic for ten tokens on average: ``q, k = a u_topic + noise``, with ``gain`` the logit of a match."""
    g = torch.Generator().manual_seed(seed)
    u = torch.nn.functional.normalize(torch.randn(topics, DIM, generator=g), dim=-1)
    values = torch.randn(topics, DIM, generator=g)
    jump = torch.rand(n, generator=g) > stay
    jump[0] = True
    which = torch.randint(topics, (n,), generator=g)[torch.where(jump, torch.arange(n), 0).cummax(0).values]
    a = math.sqrt(gain / SCALE)
    q, k = (a * u[which] + noise * torch.randn(n, DIM, generator=g) for _ in range(2))
    return [q[None, None], k[None], (values[which] + torch.randn(n, DIM, generator=g))[None]]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative squared error."""
    return float((found.detach() - expected.detach()).square().sum() / expected.detach().square().sum())


def both(f: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = f(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def compare(inputs: list[Tensor], names: dict[str, dict[str, int]], repeats: int, backward: bool) -> dict[str, Any]:
    """Forward (and forward with backward) of SDPA and of MuSe's settings in turn; errors of one run."""
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    runs: dict[str, Callable[[], Any]] = {"sdpa": lambda: sdpa(*inputs)}
    made = {name: setting(**options) for name, options in names.items()}
    runs |= {name: (lambda s=s: run(*inputs, s)) for name, s in made.items()}
    times, found = interleave(runs, repeats), {}
    exact = both(sdpa, inputs, grad) if backward else [sdpa(*inputs)]
    for name, s in made.items():
        mine = both(lambda q, k, v, s=s: run(q, k, v, s), inputs, grad) if backward else [run(*inputs, s)]
        found[name] = {"error": dict(zip(("o", "dq", "dk", "dv"), map(error, mine, exact), strict=False))}
        found[name]["forward"] = _times(times, name)
    if backward:
        runs = {"sdpa": lambda: both(sdpa, inputs, grad)}
        runs |= {name: (lambda s=s: both(lambda q, k, v: run(q, k, v, s), inputs, grad)) for name, s in made.items()}
        times = interleave(runs, repeats)
        for name in names:
            found[name]["forward and backward"] = _times(times, name)
    return found


def _times(times: Any, name: str) -> dict[str, Any]:
    """How many times as fast as SDPA, turn by turn."""
    return {
        clock: summary([b / m for b, m in zip(getattr(times["sdpa"], clock), getattr(times[name], clock), strict=True)])
        for clock in ("wall", "cpu")
    }


# -- other approximations ----------------------------------------------------------------------------------------------


def spatial(inputs: list[Tensor], s: Setting) -> Tensor:
    """Keys in blocks of neighbours instead of clusters; the same tilted summaries, queries and numbers."""
    q, k, v = inputs
    recorded = iter(scheme.forward(q, k, v, s)[2])
    made = []
    for children in units(q.shape[2], s.block):
        made.append(next(recorded))
        for start, stop in sorted({span for child in children for span in child.keys}):
            next(recorded)
            n = stop - start
            made.append((torch.arange(n) * min(s.clusters, n) // n).int()[None].expand(len(k), -1))
        made += [next(recorded) for _ in children]
    return scheme.forward(q, k, v, s, made)[0]


@contextlib.contextmanager
def untilted() -> Iterator[None]:
    """Plain centroids: the logit of the mean key and log n, and the mean value, as for every query alike."""

    def tilt(mu: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        free = (torch.arange(k.shape[2]) >= count[..., None])[..., None]
        size = count.clamp(min=1)[..., None]
        kbar, vbar = (x.masked_fill(free, 0.0).sum(2).div(size)[:, None].expand(-1, mu.shape[1], -1, -1) for x in (k, v))
        L = scale * torch.einsum("gcd,gctd->gct", mu, kbar) + count[:, None].log()
        return L, kbar.contiguous(), vbar.contiguous()

    former, primitives.tilt = primitives.tilt, tilt
    try:
        yield
    finally:
        primitives.tilt = former


@contextlib.contextmanager
def counting() -> Iterator[list[float]]:
    """Floating point operations of the matrix products inside."""
    total = [0.0]
    kept = {name: getattr(primitives, name) for name in ("tilt", "attend", "near")} | {"nearest": scheme.nearest}

    def counted(name: str, cost: Callable[..., float]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            total[0] += cost(*args)
            return kept[name](*args)

        return wrapper

    def near(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> float:
        n = q.shape[2]
        seen = sum(min(i + 1, i - (i // block - 1) * block + 1) for i in range(n))
        return 4.0 * q.shape[0] * q.shape[1] * seen * DIM

    primitives.near = counted("near", near)
    primitives.tilt = counted("tilt", lambda mu, k, *_: 6.0 * k[..., 0].numel() * mu.shape[1] * DIM)
    primitives.attend = counted("attend", lambda q, k, *_: 4.0 * q[..., 0].numel() * k.shape[1] * DIM)
    scheme.nearest = counted("nearest", lambda x, c: 2.0 * x[..., 0].numel() * c.shape[1] * DIM)
    try:
        yield total
    finally:
        primitives.near, primitives.tilt, primitives.attend = (kept[n] for n in ("near", "tilt", "attend"))
        scheme.nearest = kept["nearest"]


def flops(inputs: list[Tensor], s: Setting) -> float:
    """Of the matrix products of one forward."""
    with counting() as total:
        scheme.forward(*inputs, s)
    return total[0]


def windowed(inputs: list[Tensor], window: int, sinks: int = 4) -> Tensor:
    """Exact attention to the last ``window`` keys and the first few, chunk by chunk."""
    q, k, v = inputs
    n, out = q.shape[2], torch.empty_like(q)
    for begin in range(0, n, 512):
        rows = torch.arange(begin, min(begin + 512, n))
        first = max(0, begin - window + 1)
        columns = torch.cat([torch.arange(min(sinks, first)), torch.arange(first, int(rows[-1]) + 1)])
        keep = (columns <= rows[:, None]) & ((columns > rows[:, None] - window) | (columns < sinks))
        logits = (SCALE * q[:, :, rows] @ k[:, None, columns].mT).masked_fill(~keep, -math.inf)
        out[:, :, rows] = torch.softmax(logits, -1) @ v[:, None, columns]
    return out


def window_of(cost: float, inputs: list[Tensor]) -> int:
    """The window whose products cost as much: 4 D per query and key."""
    q = inputs[0]
    n, keys = q.shape[2], cost / (4.0 * q.shape[0] * q.shape[1] * DIM)
    window = 1
    while window < n and window * n - window * (window - 1) / 2 < keys:  # early queries have fewer keys than the window
        window += 1
    return window


# -- parts -------------------------------------------------------------------------------------------------------------


def part_synthetic(repeats: int) -> dict[str, Any]:
    """One head of topics."""
    return {str(n): compare(topical(n), SETTINGS, repeats, backward=True) for n in (8192, 16384, 32768)}


def part_threads(repeats: int) -> dict[str, Any]:
    """Two threads; and SDPA with oneDNN's products switched on, which is the stronger baseline on some CPUs."""
    out: dict[str, Any] = {}
    names = {"default (64 clusters)": {}}
    torch.set_num_threads(2)
    out["two threads, 32k"] = compare(topical(32768), names, repeats, backward=True)
    torch.set_num_threads(1)
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    former = matmul.fp32_precision
    inputs = topical(32768)

    def with_flag(f: Callable[[], Any]) -> Callable[[], Any]:
        def flagged() -> Any:
            matmul.fp32_precision = "bf16"
            try:
                return f()
            finally:
                matmul.fp32_precision = former

        return flagged

    s = setting()
    exact, mine = (lambda: sdpa(*inputs)), (lambda: run(*inputs, s))
    times = interleave({"sdpa default": exact, "muse default": mine, "sdpa flag": with_flag(exact), "muse flag": with_flag(mine)},
                       repeats)  # fmt: skip
    best = {name: min(t.cpu) for name, t in times.items()}
    out["mkldnn.matmul.fp32_precision='bf16', 32k forward"] = {
        "sdpa default / sdpa flag": best["sdpa default"] / best["sdpa flag"],
        "muse default / muse flag": best["muse default"] / best["muse flag"],
        "best sdpa / best muse": min(best["sdpa default"], best["sdpa flag"]) / min(best["muse default"], best["muse flag"]),
        "error of sdpa with the flag": error(with_flag(lambda: sdpa(*inputs))(), sdpa(*inputs)),
    }
    return out


def real(tokens: int = 8192) -> dict[int, list[Tensor]]:
    """Queries, keys (after rotary embedding) and values of SmolLM2-135M on Python's own documentation."""
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hfplug.attention import AttentionCall
    from hfplug.ledger import Ledger
    from hfplug.models import resolve_model
    from hfplug.seams.attention import register

    kept: dict[int, list[Tensor]] = {}

    class Keep:
        """Exact attention that keeps what it is given."""

        handles: frozenset[str] = frozenset()

        def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            assert call.layer_idx is not None
            if call.layer_idx in LAYERS:
                query = call.query[0].unflatten(0, (call.key.shape[1], -1))
                kept[call.layer_idx] = [query.clone(), call.key[0].clone(), call.value[0].clone()]
            return call.exact()

    path = resolve_model("smollm2")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(path)(text[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    with Ledger("muse_speed") as ledger, torch.no_grad():
        register(ledger, "keep_qkv", Keep)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="keep_qkv", dtype=torch.float32)
        model.model(ids, use_cache=False)
    return kept


def part_real(repeats: int) -> dict[str, Any]:
    """Nine layers of SmolLM2, nine query heads on three key heads; two of them timed."""
    out: dict[str, Any] = {"layers": {}}
    for layer, inputs in real().items():
        exact, others, s = sdpa(*inputs), {}, setting()
        if layer in TIMED:
            found = compare(inputs, SETTINGS, repeats, backward=False)
        else:
            found = {name: {"error": {"o": error(run(*inputs, setting(**o)), exact)}} for name, o in SETTINGS.items()}
        others["spatial blocks"] = error(spatial(inputs, s), exact)
        with untilted():
            others["untilted centroids"] = error(scheme.forward(*inputs, s)[0], exact)
        window = window_of(flops(inputs, s), inputs)
        others[f"window {window} and 4 sinks (equal products)"] = error(windowed(inputs, window), exact)
        worst = [error(a, b) for a, b in zip(run(*inputs, s).flatten(0, 1), exact.flatten(0, 1), strict=True)]
        out["layers"][str(layer)] = {"settings": found, "others": others, "error of each query head, default": worst}
        print(layer, {n: round(f["error"]["o"], 5) for n, f in found.items()}, others, flush=True)
    for name in SETTINGS:
        rows = [layer["settings"][name] for layer in out["layers"].values()]
        out[name] = {
            "mean error": sum(r["error"]["o"] for r in rows) / len(rows),
            "forward, cpu": [r["forward"]["cpu"]["median"] for r in rows if "forward" in r],
        }
    return out


def part_window(repeats: int) -> dict[str, Any]:
    """FlexAttention, compiled, on a sliding window with four sinks that costs as many products; forward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def one(n: int) -> dict[str, Any]:
        inputs, s = topical(n), setting()
        window = window_of(flops(inputs, s), inputs)
        mask = create_block_mask(lambda b, h, i, j: (j <= i) & ((i - j < window) | (j < 4)), None, None, n, n, device="cpu")
        compiled: Any = torch.compile(flex_attention)
        q, k, v = inputs[0], inputs[1][:, None], inputs[2][:, None]

        def flex() -> Any:
            return compiled(q, k, v, block_mask=mask, scale=SCALE)

        with torch.no_grad():
            times = interleave({"sdpa": lambda: sdpa(*inputs), "muse": lambda: run(*inputs, s), "flex": flex}, repeats)
            exact = sdpa(*inputs)
            errors = {"window and sinks": error(flex(), exact), "muse": error(run(*inputs, s), exact)}
            errors["spatial blocks"] = error(spatial(inputs, s), exact)
            with untilted():
                errors["untilted centroids"] = error(scheme.forward(*inputs, s)[0], exact)
        fast = {f"{name}, times as fast as sdpa": _times(times, name) for name in ("muse", "flex")}
        return {"window": window, "error": errors, **fast}

    return {str(n): one(n) for n in (8192, 16384, 32768)}


_CHILD = """
import resource, sys, torch
sys.path.insert(0, {here!r})
torch.set_num_threads(1)
import muse_speed as m
inputs = [x.expand({groups}, *x.shape[1:]).contiguous() for x in m.topical({n})]
grad = torch.randn(inputs[0].shape)
f = m.sdpa if {exact} else (lambda q, k, v: m.run(q, k, v, m.setting()))
m.both(f, [x[:1, ..., :2560, :] for x in inputs], grad[:1, :, :2560])  # what is allocated once
now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
m.both(f, inputs, grad)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - now)
"""


def part_memory(_: int) -> dict[str, Any]:
    """Peak memory of forward and backward above that of the inputs, each in a process of its own, MiB."""
    out = {}
    for n, groups in ((16384, 4), (16384, 16), (32768, 4)):
        peak = {}
        for name, exact in (("sdpa", True), ("muse", False)):
            code = _CHILD.format(here=str(Path(__file__).parent), n=n, groups=groups, exact=exact)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            peak[name] = float(done.stdout)
        out[f"{n} tokens, {groups} heads"] = {**peak, "ratio": peak["muse"] / peak["sdpa"]}
    return out


def part_curve(_: int) -> dict[str, Any]:
    """Error against products, over clusters, retrieval and block; drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    data = {"synthetic, 16k": topical(16384), "SmolLM2 layer 17, 8k": real()[17]}
    out: dict[str, Any] = {}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for ax, (title, inputs) in zip(axes, data.items(), strict=True):
        exact, full = sdpa(*inputs), 2.0 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[0].shape[2] ** 2 * DIM
        rows = []
        for retrieve, block, marker in ((0, 1024, "o"), (2, 1024, "s"), (8, 1024, "^"), (0, 512, "v"), (0, 2048, "D")):
            line = []
            for clusters in (16, 32, 64, 128):
                s = setting(clusters=clusters, retrieve=retrieve, block=block)
                line.append((flops(inputs, s) / full, error(run(*inputs, s), exact)))
                numbers = {"clusters": clusters, "retrieve": retrieve, "block": block}
                rows.append({**numbers, "products": line[-1][0], "error": line[-1][1]})
            ax.plot(*zip(*line, strict=True), marker=marker, label=f"block {block}, retrieve {retrieve}")
        line = [(window_of(full * part, inputs), part) for part in (0.1, 0.2, 0.3, 0.4)]
        ax.plot([p for _, p in line], [error(windowed(inputs, w), exact) for w, _ in line], "k--", label="window and 4 sinks")
        ax.set(xscale="log", yscale="log", title=title)
        ax.set(xlabel="matrix products, part of exact attention's", ylabel="relative squared error")
        ax.grid(alpha=0.3)
        out[title] = rows
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "benchmarks" / "results" / "muse_speed.png", dpi=130)
    return out


PARTS = {"synthetic": part_synthetic, "threads": part_threads, "real": part_real, "window": part_window, "memory": part_memory,
         "curve": part_curve}  # fmt: skip


def main() -> None:
    """Run the parts asked for and add them to the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = ROOT / "benchmarks" / "results" / "muse_speed.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stored.pop("provenance", None)
    for name in given.part or PARTS:
        stored[name] = PARTS[name](given.repeats)
        print(name, json.dumps(stored[name], indent=1, default=str), flush=True)
        write("muse_speed", stored)


if __name__ == "__main__":
    main()
