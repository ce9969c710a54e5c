"""What PatternKV costs and keeps against KIVI: SmolLM2-135M, two bits, at equal measured bytes.

quality: the keys and values of a prefix, computed exactly, are stored by each cache whole; the next 128 tokens read them back and
are compared with the exact cache: KL (mean over the tokens, geometric mean over texts) and perplexity. For keys alone, values
alone, both. Bits an element are counted from the tensors. "ratio" is KL over KIVI's with the same exact first tokens and the same
frame of the keys, interpolated in log KL to the same bits; below 1 PatternKV is better. Two curves of KIVI: one group for keys
and values (the paper), and the better of any two (K32/V64 and K64/V32 too).

Expected, written before measuring: the paper's form loses at 1k (1.12 in a prototype) and ties at 4k (.95), because of the bytes
of its patterns; the default (15 patterns of 4 bits, exact first tokens, unrotated keys) at most .8 at both lengths. The default
was chosen among seven on four texts of 1k that are not among these.

needle: a number in a long text, asked for at its end; the share of digits the model finds, teacher-forced, by the same storing.
Expected: the exact cache finds most of them at 1k; two bits lose some; PatternKV no more than KIVI.

speed: one layer of SmolLM2's shape: a decoding step on what is stored, and storing 128 tokens. Expected: PatternKV at most 1.5
times KIVI; finding the patterns once costs tens of ordinary blocks.

Run by ``python benchmarks/patternkv.py [--stage quality|needle|speed] [--quick]``; writes results/patternkv.json.
One thread; the whole takes about an hour.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import random
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import _bench
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hfplug.caches import make
from hfplug.models import model_label, resolve_model

METHODS = ("patternkv", "kivi")

NEW, HEADS, DIM = 128, 3, 64
FILES = ("calendar", "difflib", "doctest", "inspect", "logging/__init__", "mailbox", "optparse", "pathlib")
SAME = {"sink_tokens": 4, "pre_rope": True}
PLAIN = {"sink_tokens": 0, "pre_rope": False}
# name -> method, options, and which curve of KIVI it is held against
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"kivi K{k}/V{v}{tag}": ("kivi", {"group_size": k, "value_group": v, **extra}, tag)
        for tag, extra in (("", PLAIN), (" +", SAME))
        for k, v in ((128, 64), (64, 64), (32, 32), (32, 64), (64, 32))
    },
    "patternkv paper": ("patternkv", {"share_batch": False, "__authors__": True}, ""),
    "patternkv plain": ("patternkv", PLAIN, ""),
    "patternkv": ("patternkv", SAME, " +"),
    "patternkv K128": ("patternkv", {"key_group": 128, **SAME}, " +"),
    "patternkv K32": ("patternkv", {"key_group": 32, **SAME}, " +"),
    "patternkv 8 patterns of 8 bits": ("patternkv", {"key_patterns": 8, "value_patterns": 8, "pattern_bits": 8, **SAME}, " +"),
}
QUICK = ("kivi K64/V64 +", "kivi K32/V32 +", "kivi K32/V64 +", "kivi K64/V64", "kivi K32/V32", "patternkv paper", "patternkv")


def texts(tokenizer: Any, count: int, length: int, *, prose: bool = False) -> list[torch.Tensor]:
    """Ids ``(1, length)`` of Python sources and of Python's help pages in turn; ``prose``: of the latter alone, half as many."""
    from pydoc_data import topics

    names = sorted(topics.topics)
    random.Random(1).shuffle(names)
    pages = tokenizer("\n\n".join(topics.topics[n] for n in names)).input_ids
    lib, found = Path(sysconfig.get_paths()["stdlib"]), []
    for i in range(1 if prose else 0, count, 2 if prose else 1):
        ids = pages[i // 2 * length :] if i % 2 else tokenizer((lib / f"{FILES[i // 2]}.py").read_text("utf-8")).input_ids[200:]
        if len(ids) < length:
            raise SystemExit(f"text {i} has {len(ids)} tokens, {length} are needed")
        found.append(torch.tensor([ids[:length]]))
    return found


def built(name: str, model: Any) -> Any:
    """An empty cache of a variant."""
    method, options, _ = VARIANTS[name]
    if "__authors__" in options:
        from hfplug.kernels.patternkv import PatternKVCache, PatternKVConfig

        return PatternKVCache(model.config, PatternKVConfig.authors(share_batch=False))
    return make(method, model, **options)


def exact_states(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, cache=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def stored(name: str, model: Any, states: Any) -> tuple[list[Any], dict[str, float]]:
    """What a variant reads back, and its bits an element: of keys, of values, of both."""
    cache = built(name, model)
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.update(keys, values)
    bits = {}
    for part in ("key", "value"):
        total = elements = 0
        for layer, (keys, _) in zip(cache.layers, states, strict=True):
            elements += keys.numel()
            for n, t in layer.state.items():
                if n.startswith(part):
                    total += 8 * t.numel() * t.element_size()
                elif n == f"sink_{part}s":
                    total += 16 * t.numel()  # a model in half precision
        bits[part] = total / elements
    bits["both"] = (bits["key"] + bits["value"]) / 2
    return [layer.read() for layer in cache.layers], bits


def logits(model: Any, states: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens after a prefix with these keys and values."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.update(keys, values)
    return model(input_ids=ids, cache=cache).logits.float().log_softmax(-1)


def interpolated(bits: float, curve: list[tuple[float, float]]) -> float:
    """Log KL of a curve at these bits: linear between neighbours on its lower hull, beyond its ends along the last line."""
    points: list[tuple[float, float]] = []
    best = {b: min(y for other, y in curve if other == b) for b, _ in curve}  # keys alone do not see the group of the values
    for point in sorted(best.items()):
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-2], point):
            points.pop()
        points.append(point)
    i = next((i for i in range(1, len(points) - 1) if bits <= points[i][0]), len(points) - 1)
    (b0, y0), (b1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (bits - b0) / (b1 - b0)


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / max(b[0] - a[0], 1e-9)


@torch.no_grad()
def quality(model: Any, tokenizer: Any, quick: bool, lengths: list[int]) -> dict[str, Any]:
    """KL and perplexity by variant, part and length."""
    result: dict[str, Any] = {}
    names = QUICK if quick else tuple(VARIANTS)
    for length in lengths:
        seen: dict[str, dict[str, list[dict[str, float]]]] = {}
        for text in texts(tokenizer, 4 if quick else 8, length + NEW):
            states, after = exact_states(model, text[:, :length]), text[:, length:]
            exact = logits(model, states, after)
            for name in names:
                read, bits = stored(name, model, states)
                for part in ("both",) if quick or length > 1024 else ("key", "value", "both"):
                    mixed = [
                        (r[0] if part != "value" else s[0], r[1] if part != "key" else s[1])
                        for r, s in zip(read, states, strict=True)
                    ]
                    found = logits(model, mixed, after)
                    kl = float((exact.exp() * (exact - found)).sum(-1).mean())
                    nll = [float(-t[0, :-1].gather(1, after[0, 1:, None]).mean()) for t in (found, exact)]
                    row = {"bits": bits[part], "log_kl": math.log(kl), "nll": nll[0], "nll_exact": nll[1]}
                    seen.setdefault(part, {}).setdefault(name, []).append(row)
        result[str(length)] = {part: _compared(rows) for part, rows in seen.items()}
        for part, rows in result[str(length)].items():
            for name, row in rows.items():
                print(
                    f"{length} {part:5} {name:32} {row['bits']:.3f} bits  KL {row['kl']:.4f}  ppl x{row['ppl_ratio']:.3f}", end=""
                )
                print(
                    "".join(f"  {k} {row[k]['ratio']:.2f} ({row[k]['won']})" for k in ("one_group", "any_groups") if k in row),
                    flush=True,
                )
    return result


def _compared(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, texts_ in rows.items():
        mean = statistics.fmean(t["log_kl"] for t in texts_)
        more = statistics.fmean(t["nll"] - t["nll_exact"] for t in texts_)
        out[name] = {"bits": texts_[0]["bits"], "kl": math.exp(mean), "ppl_ratio": math.exp(more), "texts": texts_}
        if not name.startswith("patternkv"):
            continue
        tag = VARIANTS[name][2]
        for label, groups in (
            ("one_group", ("K64/V64", "K32/V32")),
            ("any_groups", ("K64/V64", "K32/V32", "K32/V64", "K64/V32")),
        ):
            curve = [f"kivi {g}{tag}" for g in groups if f"kivi {g}{tag}" in rows]
            logs = [
                t["log_kl"] - interpolated(t["bits"], [(rows[c][i]["bits"], rows[c][i]["log_kl"]) for c in curve])
                for i, t in enumerate(texts_)
            ]
            out[name][label] = {
                "ratio": math.exp(statistics.fmean(logs)),
                "se_log": statistics.stdev(logs) / math.sqrt(len(logs)),
                "won": f"{sum(x < 0 for x in logs)}/{len(logs)}",
            }
    return out


@torch.no_grad()
def needle(model: Any, tokenizer: Any, quick: bool, lengths: list[int]) -> dict[str, Any]:
    """Share of the digits of a hidden number that are the most likely token, by length."""
    names = ("kivi K64/V64 +", "kivi K32/V32 +", "patternkv") + (() if quick else ("kivi K32/V32", "patternkv paper"))
    result: dict[str, Any] = {}
    for length in lengths:
        found: dict[str, list[float]] = {}
        hay = texts(tokenizer, 2 if quick else 4, length, prose=True)
        for i, text in enumerate(hay * 2):
            draw = random.Random(i)
            number = "".join(draw.choice("123456789") for _ in range(6))
            pin = tokenizer(f"\n\nThe secret number is {number}. Remember it: {number}.\n\n").input_ids
            end = tokenizer("\n\nThe secret number is", add_special_tokens=False).input_ids
            answer = tokenizer(f" {number}", add_special_tokens=False).input_ids
            at = int((i + 0.5) / (2 * len(hay)) * (length - len(pin)))
            ids = torch.cat((text[:, :at], torch.tensor([pin]), text[:, at : length - len(pin)]), dim=1)
            states, asked = exact_states(model, ids), torch.tensor([end + answer])
            for name in ("exact", *names):
                read = states if name == "exact" else stored(name, model, states)[0]
                guess = logits(model, read, asked).argmax(-1)[0, len(end) - 1 : -1]
                found.setdefault(name, []).append(float((guess == torch.tensor(answer)).float().mean()))
        result[str(length)] = {name: {"share": statistics.fmean(v), "texts": v} for name, v in found.items()}
        print(length, {name: round(row["share"], 3) for name, row in result[str(length)].items()})
    return result


def _runs(model: Any, length: int, extra: dict[str, Any]) -> dict[str, Any]:
    from hfplug.kernels.patternkv import attend

    keys, values = torch.randn(2, 1, HEADS, length, DIM, generator=torch.Generator().manual_seed(0)).unbind()
    query = torch.randn(1, 3 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    kivi, ours = make("kivi", model, group_size=64, **extra).layers[0], make("patternkv", model, **extra).layers[0]
    for layer in (kivi, ours):
        layer.update(keys, values)

    def step(layer: Any) -> None:
        read = (t.repeat_interleave(3, dim=1) for t in layer.read())
        torch.nn.functional.scaled_dot_product_attention(query, *read)

    def store(layer: Any) -> None:
        before = dict(layer.state)
        layer.encode(keys[:, :, :128], values[:, :, :128], torch.ones(1, 128, dtype=torch.bool))
        layer.state = before

    return {
        "kivi": lambda: step(kivi),
        "patternkv": lambda: step(ours),
        "split": lambda: attend(query, ours, scaling=DIM**-0.5),
        "store kivi": lambda: store(kivi),
        "store patternkv": lambda: store(ours),
        "prefill": lambda: make("patternkv", model, **extra).layers[0].update(keys, values),
    }


@torch.no_grad()
def speed(model: Any, quick: bool) -> dict[str, Any]:
    """A step of one layer, and storing a block, as multiples of KIVI's."""
    result: dict[str, Any] = {}
    for length in (1024,) if quick else (1024, 4096, 16384):
        for frame, extra in (("unrotated", SAME), ("rotated", PLAIN)):
            times = {name: t.cpu for name, t in _bench.interleave(_runs(model, length, extra), 5 if quick else 9).items()}
            found = {
                "read and attend": _bench.ratios(times["patternkv"], times["kivi"]),
                "split attention": _bench.ratios(times["split"], times["kivi"]),
                "store 128 tokens": _bench.ratios(times["store patternkv"], times["store kivi"]),
                "patterns and prefix, in blocks of KIVI": _bench.ratios(times["prefill"], times["store kivi"]),
            }
            result[f"{length} {frame}"] = found
            print(length, frame, {name: round(row["median"], 2) for name, row in found.items()}, flush=True)
    return result


def results_row(result: dict[str, Any]) -> _bench.ResultRow | None:
    """What stands on the results page."""
    both = {length: parts["both"] for length, parts in result.get("quality", {}).items() if "both" in parts}
    if not both:
        return None  # that stage has not run yet
    ratios = {length: rows["patternkv"]["one_group"] for length, rows in both.items()}
    paper = {length: rows["patternkv paper"]["one_group"] for length, rows in both.items()}
    met = all(r["ratio"] <= 0.8 for r in ratios.values())
    return _bench.ResultRow(
        "KL to the exact cache at equal bytes, keys and values of two bits: at most .8 of KIVI's with the same options",
        "better than KIVI at two bits on reasoning sets, with 7B and 8B models",
        "; ".join(
            f"{length} tokens {r['ratio']:.2f} ({r['won']} texts; the paper's form {paper[length]['ratio']:.2f})"
            for length, r in ratios.items()
        ),
        "target met" if met else "target missed",
    )


def main() -> None:
    """Run the stages; keep what other stages wrote before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("quality", "needle", "speed"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="of texts; default 1024 if quick, else 1024 4096, needle 4096 7936"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    file = _bench.ROOT / "benchmarks" / "results" / "patternkv.json"
    result = json.loads(file.read_text("utf-8")) if file.is_file() and not arguments.quick else {}
    result.pop("provenance", None)
    result["model"] = model_label("smollm2")
    lengths = arguments.lengths or ([1024] if arguments.quick else [1024, 4096])
    needles = arguments.lengths or ([1024] if arguments.quick else [4096, 7936])
    stages = {
        "quality": lambda: {**result.get("quality", {}), **quality(model, tokenizer, arguments.quick, lengths)},
        "needle": lambda: {**result.get("needle", {}), **needle(model, tokenizer, arguments.quick, needles)},
        "speed": lambda: speed(model, arguments.quick),
    }
    for stage, run in stages.items():
        if arguments.stage in (None, stage):
            result[stage] = run()
            if arguments.quick:
                print(json.dumps(result[stage], indent=1))
            else:
                _bench.write("patternkv", result, results_row)


if __name__ == "__main__":
    main()
