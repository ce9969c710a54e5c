"""What MuSe does to a language model that was trained with exact attention: SmolLM2-135M at 8192 tokens, without training.

Texts: "doc", the help topics of Python (pydoc_data), sorted and joined; "code", the standard library's a*.py. Compared, in all
30 layers: exact attention; MuSe with few clusters, as it comes, with many, and with retrieval; and, as what MuSe must beat, a
sliding window whose queries see the first 4 tokens as well: of 1536 keys, as many as MuSe sees exactly on average, and of the
width that takes MuSe's time here. Then calibrate() on the first 8192 tokens of doc, checked on the 8192 tokens after them and
on code, neither of which it saw. Last, added after the windows had come out level with MuSe: windows with as many heads left
exact as calibrate() leaves, for what is gained there may be the calibration's doing and not the summaries'.

Expected before measuring (a prototype had been measured on doc: +7 to +10 % perplexity, an early form of calibrate() +0.2 %):
all layers on MuSe: +6 to +9 %, more in the second half than in the first, more clusters and retrieval better by a third at
most, for a few heads carry the loss. The windows lose more than that at MuSe's number of exact keys, less than MuSe's loss at
no width that costs as much. After calibrate(): within its budget on its own text with at least 25 of 30 layers on MuSe; on the
rest of doc about the same; on code up to twice the budget, because other heads retrieve there.

    python benchmarks/muse_quality.py                       # all stages, about 50 minutes on one thread
    python benchmarks/muse_quality.py --stage perplexity    # or cost, calibrate, held_out, windows_calibrated, plot
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib as mpl
import torch
import transformers
from _bench import ROOT, ResultRow, interleave, provenance, ratios, summary, write
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfplug.attention import AttentionCall
from hfplug.kernels.muse import calibrate, configure
from hfplug.kernels.muse.calibration import LayerPlan, Plan
from hfplug.ledger import Ledger
from hfplug.models import resolve_model
from hfplug.seams.attention import register

METHODS = ("muse",)

TOKENS, BIN, SINKS, ROWS, BUDGET = 8192, 512, 4, 256, 0.01
MUSE: dict[str, dict[str, int]] = {
    "MuSe, 32 clusters": {"clusters": 32, "query_clusters": 32},
    "MuSe": {},
    "MuSe, 128 clusters": {"clusters": 128},
    "MuSe, 4 tiles retrieved": {"retrieve": 4},
}
WINDOWS = (1536, 2048, 1024, 3072)
LEFT_OUT = {"doc": (), "code": ("MuSe, 128 clusters", "window 1024 + 4", "window 3072 + 4")}  # a forward takes a minute
AGAINST_PLAN = (1536, 2048)
COST_LAYERS = (5, 18, 29)
PATH = ROOT / "benchmarks" / "results" / "muse_quality.json"


# -- texts and losses --------------------------------------------------------------------------------------------------


def text(name: str) -> str:
    """``doc`` or ``code``, whole."""
    if name == "doc":
        return "\n\n".join(topics[topic] for topic in sorted(topics))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def pieces(name: str, tokens: int = TOKENS) -> list[Tensor]:
    """Token ids of a text, in pieces ``(tokens,)``; what is left at the end is dropped."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    ids = torch.tensor(tokenizer(text(name), verbose=False)["input_ids"])
    return list(ids.split(tokens))[: len(ids) // tokens]


def load(dtype: torch.dtype = torch.float32) -> Any:
    """The model."""
    return transformers.AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=dtype).eval()


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, chunk: int = 512) -> Tensor:
    """Loss of each next token ``(tokens - 1,)`` in nats; the logits are made in chunks, whole they would take 1.6 GB."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    parts = zip(hidden.split(chunk), ids[1:].split(chunk), strict=True)
    return torch.cat([cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in parts])


def figures(losses: Tensor, exact: dict[str, Any] | None) -> dict[str, Any]:
    """Loss, perplexity, the curve over positions, and what they are against exact attention."""
    out: dict[str, Any] = {
        "loss": float(losses.mean()),
        "second half": float(losses[TOKENS // 2 :].mean()),
        "curve": [float(part.mean()) for part in losses.split(BIN)],
    }
    if exact is not None:
        out["difference"] = out["loss"] - exact["loss"]
        out["perplexity ratio"] = math.exp(out["difference"])
        out["difference, second half"] = out["second half"] - exact["second half"]
    return out


# -- what is compared --------------------------------------------------------------------------------------------------


class Window:
    """Exact attention to the last ``width`` tokens, the query's own included, and to the first ``SINKS`` ones."""

    handles: frozenset[str] = frozenset()

    def __init__(self, width: int) -> None:
        self.width = width
        self.exact_heads: dict[int, list[int]] = {}  # layer -> key heads that see everything

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """The window, and what stays exact beside it."""
        left = self.exact_heads.get(call.layer_idx or 0, [])
        chosen = [head for head in range(call.key.shape[1]) if head not in left]
        if not left:
            return self.inside(call), None
        out = call.query.new_empty(call.query.transpose(1, 2).shape).unflatten(2, (call.key.shape[1], -1))
        for heads, compute in ((left, lambda part: part.exact()[0]), (chosen, self.inside)):
            if heads:
                query = call.query.unflatten(1, (call.key.shape[1], -1))[:, heads].flatten(1, 2)
                part = dataclasses.replace(call, query=query, key=call.key[:, heads], value=call.value[:, heads])
                out[:, :, heads] = compute(part).unflatten(2, (len(heads), -1))
        return out.flatten(2, 3), None

    def inside(self, call: AttentionCall) -> Tensor:
        """In tiles of ``ROWS`` queries, so that the cost is that of the window and not of the whole square."""
        assert call.uniform
        assert call.causal
        assert call.query.shape[2] == call.key.shape[2]
        tokens, groups, out = call.query.shape[2], call.query.shape[1] // call.key.shape[1], []
        for start in range(0, tokens, ROWS):
            rows = torch.arange(start, min(start + ROWS, tokens))[:, None]
            first = max(0, start - self.width + 1)
            seen = torch.cat([torch.arange(min(SINKS, first)), torch.arange(first, start + len(rows))])
            mask = (seen <= rows) & ((seen > rows - self.width) | (seen < SINKS))
            key, value = (x[:, :, seen].repeat_interleave(groups, 1) for x in (call.key, call.value))
            query = call.query[:, :, start : start + ROWS]
            out.append(scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scaling))
        return torch.cat(out, 2).transpose(1, 2).contiguous()


class Errors:
    """Exact attention, which notes what windows would have given."""

    handles: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.found: dict[int, dict[tuple[int, int], float]] = {width: {} for width in AGAINST_PLAN}

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """``found``: width -> (layer, key head) -> relative squared error."""
        out, groups = call.exact()[0], call.key.shape[1]
        for width, found in self.found.items():
            norms = [x.double().square().sum((0, 1, 3)).view(groups, -1).sum(1) for x in (Window(width).inside(call) - out, out)]
            found |= {(call.layer_idx or 0, head): float(e) for head, e in enumerate(norms[0] / norms[1])}
        return out, None


def window_name(width: int) -> str:
    """As the table says it."""
    return f"window {width} + {SINKS}"


def variants(model: Any) -> dict[str, Callable[[], Any]]:
    """Name -> what puts all layers on it; returns a ledger that takes the options back."""

    def switch(implementation: str, options: dict[str, Any] | None = None) -> Any:
        model.set_attn_implementation(implementation)
        return Ledger("nothing") if options is None else configure(model, **options)

    out: dict[str, Callable[[], Any]] = {"exact": lambda: switch("sdpa")}
    for name, options in MUSE.items():
        out[name] = lambda options=options: switch("muse", options)
    for width in WINDOWS:
        out[window_name(width)] = lambda width=width: switch(f"window_{width}")
    return out


@contextmanager
def attention_calls(model: Any, seen: Callable[[Any, tuple[Any, ...], dict[str, Any], float], None]) -> Iterator[None]:
    """Tell ``seen(module, (q, k, v, mask), keywords, CPU seconds)`` of every attention call of the model as it is set now."""
    name = model.config._attn_implementation
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def timed(module: Any, *tensors: Any, **keywords: Any) -> Any:
        began = time.process_time()
        out = inner(module, *tensors, **keywords)
        seen(module, tensors, keywords, time.process_time() - began)
        return out

    with Ledger("attention_calls") as ledger:
        ledger.set_item(ALL_ATTENTION_FUNCTIONS, name, timed)
        yield


def measured(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Losses, and seconds: on the wall, of CPU, of CPU in attention."""
    spent: list[float] = []
    with attention_calls(model, lambda *call: spent.append(call[-1])):
        wall, cpu = time.perf_counter(), time.process_time()
        losses = token_losses(model, ids)
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "attention": sum(spent)}
    return losses, took


# -- results -----------------------------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """What earlier stages wrote."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}


def keep(stage: str, result: dict[str, Any]) -> None:
    """Put a stage's result beside the others', with where it comes from."""
    every = {name: value for name, value in stored().items() if name != "provenance"}
    every |= {"claim": str(__doc__).splitlines()[0], "tokens": TOKENS, stage: {**result, "provenance": provenance()}}
    write("muse_quality", every, results_row)


# -- stages ------------------------------------------------------------------------------------------------------------


def perplexity(model: Any, texts: Sequence[str] = ("doc", "code")) -> None:
    """Every variant on the texts; those already in the file are not measured again."""
    found = stored().get("perplexity", {})
    for name in texts:
        ids, rows = pieces(name)[0], found.setdefault(name, {})
        for variant, switch in variants(model).items():
            if variant in rows or variant in LEFT_OUT[name]:
                continue
            with switch():
                losses, took = measured(model, ids)
            rows[variant] = {**figures(losses, rows.get("exact")), "seconds": took}
            keep("perplexity", found)
            row = rows[variant]
            print(f"{name:5} {variant:26} loss {row['loss']:.4f} {row.get('difference', 0):+.4f} "
                  f"second half {row.get('difference, second half', 0):+.4f} {took}", flush=True)  # fmt: skip


def cost(model: Any) -> None:
    """Time of attention alone, of three layers on doc, all variants in turn."""
    calls: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: Any, tensors: tuple[Any, ...], keywords: dict[str, Any], _: float) -> None:
        if module.layer_idx in COST_LAYERS:
            calls[module.layer_idx] = module, tensors, keywords

    every = variants(model)
    with every["exact"](), attention_calls(model, note):
        token_losses(model, pieces("doc")[0])

    @torch.no_grad()
    def run(switch: Callable[[], Any]) -> None:
        with switch():
            for module, tensors, keywords in calls.values():
                ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation](module, *tensors, **keywords)

    times = interleave({name: lambda switch=switch: run(switch) for name, switch in every.items()}, repeats=3)
    rows = {name: {"cpu seconds": summary(t.cpu), "exact / it": ratios(times["exact"].cpu, t.cpu)} for name, t in times.items()}
    for name, row in rows.items():
        print(f"{name:26} {row['cpu seconds']['median']:.2f} s, {row['exact / it']['median']:.2f} times as fast as exact")
    keep("cost", {"layers": list(COST_LAYERS), "variants": rows})


def calibration(model: Any) -> None:
    """The plan, and from it the error of every layer and key head with the options as they come."""
    model.set_attn_implementation("muse")
    plan = calibrate(model, [pieces("doc")[0]], budget=BUDGET)
    errors = {f"{layer.layer}.{head}": e for layer in plan.layers for head, e in enumerate(layer.error["default"])}
    worst = sorted(errors.items(), key=lambda item: -item[1])
    print("worst heads, as it comes:", {name: round(e, 4) for name, e in worst[:12]})
    values = [e for _, e in worst]
    result = {
        "budget": BUDGET, "layers on MuSe": plan.on_muse, "layers": len(plan.layers), "ratio, estimated": plan.ratio,
        "heads kept exact": sum(len(x.exact_heads) for x in plan.layers), "heads": len(errors),
        "exact loss": plan.exact_loss, "loss": plan.loss, "worst heads": dict(worst[:12]),
        "median error of a head": values[len(values) // 2], "heads with error over .01": sum(e > 0.01 for e in values),
        "plan": dataclasses.asdict(plan),
    }  # fmt: skip
    keep("calibrate", result)


def held_out(model: Any) -> None:
    """Exact attention and the plan in turn, on the text of the calibration and on two others."""
    kept = stored()["calibrate"]["plan"]
    plan = Plan(**{**kept, "layers": [LayerPlan(**layer) for layer in kept["layers"]]})
    doc, code = pieces("doc"), pieces("code")
    texts = {"doc, the 8192 tokens after": doc[1], "code": code[0], "doc, calibrated on": doc[0]}
    result = stored().get("held_out", {})
    if result.get("options") != kept["options"]:  # of another plan
        result = {"options": kept["options"], "texts": {}, "seconds": {"exact": [], "calibrated": []}}
    rows, exact_time, plan_time = result["texts"], *result["seconds"].values()
    for turn, (name, ids) in enumerate(texts.items()):
        if name in rows:
            continue
        found = {}
        for which in ("sdpa", "muse") if turn % 2 == 0 else ("muse", "sdpa"):
            model.set_attn_implementation(which)
            with ExitStack() as stack:
                if which == "muse":
                    stack.enter_context(plan.apply(model))
                found[which] = measured(model, ids)
        exact = figures(found["sdpa"][0], None)
        rows[name] = {"exact": exact, "calibrated": figures(found["muse"][0], exact)}
        exact_time.append(found["sdpa"][1])
        plan_time.append(found["muse"][1])
        row = rows[name]["calibrated"]
        print(f"{name:28} exact {exact['loss']:.4f} calibrated {row['difference']:+.4f} ({row['perplexity ratio'] - 1:+.2%}), "
              f"second half {row['difference, second half']:+.4f}", exact_time[-1], plan_time[-1], flush=True)  # fmt: skip
        speed = {what: ratios([t[what] for t in exact_time], [t[what] for t in plan_time]) for what in exact_time[0]}
        result["exact / calibrated"] = speed
        keep("held_out", result)
    print({f"exact / calibrated, {what}": round(each["median"], 3) for what, each in result["exact / calibrated"].items()})


def windows_calibrated(model: Any) -> None:
    """Windows with as many heads exact as the plan has, each its own worst on doc: what calibration alone is worth."""
    found, errors = stored(), Errors()
    kept = found["calibrate"]["heads kept exact"]
    texts = {"doc, the 8192 tokens after": pieces("doc")[1], "code": pieces("code")[0], "doc, calibrated on": pieces("doc")[0]}
    rows: dict[str, Any] = {}
    with Ledger("windows_calibrated") as ledger:
        register(ledger, "window_errors", errors)
        model.set_attn_implementation("window_errors")
        token_losses(model, texts["doc, calibrated on"])
        for width, each in errors.found.items():
            worst = sorted(each, key=lambda place: -each[place])[:kept]
            method = Window(width)
            for layer, head in worst:
                method.exact_heads.setdefault(layer, []).append(head)
            register(ledger, f"window_plan_{width}", method)
            model.set_attn_implementation(f"window_plan_{width}")
            row = rows[window_name(width)] = {"exact heads": {f"{x}.{y}": each[x, y] for x, y in worst}, "texts": {}}
            for name, ids in texts.items():
                losses, took = measured(model, ids)
                row["texts"][name] = {**figures(losses, found["held_out"]["texts"][name]["exact"]), "seconds": took}
                print(
                    f"{window_name(width)}, {kept} heads exact, {name:28} {row['texts'][name]['difference']:+.4f} {took}",
                    flush=True,
                )
            keep("windows_calibrated", {"heads exact": kept, "windows": rows})
        model.set_attn_implementation("sdpa")


def plot() -> None:
    """Loss over exact attention's by position."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    every = stored()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    names = [*MUSE, *map(window_name, WINDOWS), "MuSe, calibrated on doc"]
    middle = [BIN * (i + 0.5) for i in range(TOKENS // BIN)]
    for axis, (name, held) in zip(axes, (("doc", "doc, calibrated on"), ("code", "code")), strict=True):
        rows = every["perplexity"][name]
        exact = rows["exact"]["curve"]
        lines = {k: row["curve"] for k, row in rows.items() if k != "exact"}
        if "held_out" in every:
            lines["MuSe, calibrated on doc"] = every["held_out"]["texts"][held]["calibrated"]["curve"]
        for line, curve in lines.items():
            style = "--" if line.startswith("window") else "-"
            colour = f"C{names.index(line)}"
            axis.plot(middle, [a - b for a, b in zip(curve, exact, strict=True)], style, color=colour, label=line, lw=1.3)
        axis.axhline(0, color="grey", lw=0.8)
        axis.set(title=name, xlabel="position")
    axes[0].set_ylabel("loss over exact attention's, nats per token")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"SmolLM2-135M, no training, all layers but for the calibrated; mean of {BIN} positions")
    figure.savefig(PATH.with_suffix(".png"), dpi=120)
    print(PATH.with_suffix(".png"))


def results_row(result: dict[str, Any]) -> ResultRow | None:
    """What stands on the results page."""
    if "perplexity" not in result:
        return None  # that stage has not run yet
    tables = result["perplexity"]
    told = [f"{kind} {v['MuSe']['perplexity ratio']:.3f} (a window of 2048: {v['window 2048 + 4']['perplexity ratio']:.3f})"
            for kind, v in tables.items() if isinstance(v, dict) and "MuSe" in v]  # fmt: skip
    return ResultRow(
        "a model trained with exact attention keeps its perplexity under MuSe, at 8k tokens",
        "close to exact attention (abstract); no figure for this size",
        "perplexity over exact attention: " + "; ".join(told),
        "measured",
    )


def main() -> None:
    """The stages asked for."""
    stages: dict[str, Callable[[Any], None]] = {
        "perplexity": lambda model: perplexity(model, options.text), "cost": cost, "calibrate": calibration, "held_out": held_out,
        "windows_calibrated": windows_calibrated,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--stage", nargs="*", choices=[*stages, "plot"], default=[*stages, "plot"])
    parser.add_argument("--text", nargs="*", choices=("doc", "code"), default=("doc", "code"), help="of the stage perplexity")
    options = parser.parse_args()
    asked = options.stage
    torch.set_num_threads(1)
    with Ledger("muse_quality") as ledger:
        for width in WINDOWS:
            register(ledger, f"window_{width}", Window(width))
        model = load() if set(asked) - {"plot"} else None
        for name, stage in stages.items():
            if name in asked:
                stage(model)
        if "plot" in asked:
            plot()


if __name__ == "__main__":
    main()
