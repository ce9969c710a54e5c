"""Perplexity of SmolLM2-135M in MXFP4 with OAS and MBS, beside plain MXFP4, NVFP4 and NF4: which share of the gap comes back.

The paper's claim, in its own figures (Qwen3-8B, perplexity): of the way from MXFP4 (OCP-32) to NVFP4 in log perplexity, OAS-16
takes .59 and MBS-H .85. Here weights and inputs of all 210 linear layers are rounded (W4A4); embedding, head and norms are not.

SmolLM2's file is itself a grid of 16 levels per 32 weights, which flatters some formats. So the main model is "healed": every
weight moved by a uniform draw of half a grid step either way, then 65 steps of full fine-tuning (AdamW, 2e-4, 2 x 512 tokens) to
win back what that cost; draws as time allows (`--until`), the first on 50 chunks of 1024 tokens,
others on 10 in the formats of `CORE`. The raw
file comes second (12 chunks), and only with rounded inputs; "W4A16" (weights alone, 12) is of the first healed model. Text:
Python's help topics and sources in turn; healing sees other topics and other files of the same kind, so perplexities are compared
within a model, never between two. Differences are paired with the same model unrounded; +- is the standard error over chunks,
intervals are bootstraps over chunks (95 %). Beside them: QSNR of the weights, and the signal-to-noise ratio of the outputs of 70
layers (median, first tokens left out), both in dB.

Expected, written before measuring: on every model OCP-32 > OAS-16 > MBS-H > NVFP4 in perplexity. MBS-H recovers at least .85 of
the gap on the first healed model and in the mean over the healed ones (a prototype: .83 healed, .92 raw); OAS-16 .35 to .55,
EVEN-32, the baseline that costs nothing, .1 to .3. OCP-16 is a tie with EVEN-32, MBS-H one with MBS-S. MBS-H stays 2 to 12 %
above NVFP4's perplexity: "less than 1 %" is not claimed. Layer outputs: MBS-H at least 1 dB above OAS-16, at most 1 dB below
NVFP4. Two better choices within the options, each a row: macro blocks of 64 (4.625 bits in place of 4.5625) recover at least .90;
factors of the weights chosen by the error of the layer's output (`importance`, calibrated on healing text) at least as much as
MBS-H. Verdict: "reproduced" if the order holds on every model and MBS-H reaches .85 in both ways above; "partly" if only the
order holds.

    python benchmarks/mxfp4_quality.py [--work FOLDER] [--until N]     # --quick: a tiny form of all of it; writes nothing

Healed models and losses by chunk are kept under ``--work``: a run that is broken off goes on there (a healing starts again).
One thread, CPU: about 90 minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import hashlib
import json
import math
import random
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bench import ROOT, ResultRow, write
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfplug.kernels.mxfp4_plus import calibrate, codec, nvfp4
from hfplug.kernels.mxfp4_plus.calibration import Importance, read_importance
from hfplug.kernels.mxfp4_plus.formats import Format
from hfplug.models import model_label, resolve_model

METHODS = ("mxfp4_plus",)

FORMATS = {
    "OCP-32": Format(32, "floor"),
    "EVEN-32": Format(32, "even"),
    "OCP-16": Format(16, "floor"),
    "OAS-16": Format(16, "oas"),
    "MBS-S": Format(mbs="static"),
    "MBS-H": Format(mbs="hybrid"),
    "MBS-D": Format(mbs="dynamic"),
    "MBS-H macro 64": Format(mbs="hybrid", macro=64),
    "MBS-H importance": Format(mbs="hybrid"),
}
BITS = {name: fmt.bits for name, fmt in FORMATS.items()} | {"unrounded": 16.0, "NVFP4": 4.5, "NF4, weights only": 4.5}
CORE = ("unrounded", "OCP-32", "NVFP4", "MBS-H", "OAS-16", "EVEN-32", "MBS-S", "MBS-H macro 64", "MBS-H importance")
ALL = (*CORE, "OCP-16", "NF4, weights only", "MBS-D")
WEIGHTS = ("unrounded", "OCP-32", "NVFP4", "MBS-H", "OAS-16", "EVEN-32", "MBS-H importance", "NF4, weights only")
ORDER = ("OCP-32", "OAS-16", "MBS-H", "NVFP4")


@dataclass(frozen=True)
class Part:
    """One model, on so many chunks, in these formats."""

    name: str
    seed: int | None
    chunks: int
    rows: tuple[str, ...]
    activations: int = 4


@dataclass(frozen=True)
class Sizes:
    """What ``--quick`` makes small."""

    length: int = 1024
    steps: int = 65
    batch: tuple[int, int] = (2, 512)
    parts: tuple[Part, ...] = (
        Part("healed 0", 0, 50, ALL),
        Part("raw", None, 12, (*CORE, "OCP-16")),
        Part("healed 1", 1, 10, CORE),
        Part("healed 2", 2, 10, CORE),
        Part("healed 0, W4A16", 0, 12, WEIGHTS, 16),
    )


QUICK = Sizes(
    128, 1, (1, 128), (Part("healed 0", 0, 2, (*CORE[:3], *ALL[-2:-1])), Part("raw", None, 2, ("unrounded", "MBS-H importance")))
)


def texts(tokenizer: Any, sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Chunks to measure on, ``(1, length + 1)``, topics and sources in turn, and pieces to heal on, ``(batch length,)``."""
    from pydoc_data import topics

    count = max(part.chunks for part in sizes.parts)
    each, width, piece = (count + 1) // 2, sizes.length + 1, sizes.batch[1]
    pieces = sizes.steps * sizes.batch[0] // 2 + 1
    draw = random.Random(1)
    names = sorted(topics.topics)
    draw.shuffle(names)
    prose: list[list[int]] = []
    for name in names:  # the first topics to measure on; healing begins with a new one
        if len(prose) < 1 or (len(prose) < 2 and len(prose[0]) >= each * width):
            prose.append([])
        prose[-1] += tokenizer(topics.topics[name] + "\n\n").input_ids
    files = [p for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) if p.stat().st_size > 8 * width]
    draw.shuffle(files)
    measured, healing = [], []
    for file in files:
        ids = tokenizer(file.read_text("utf-8")[:60_000]).input_ids
        if len(measured) < each and len(ids) >= 200 + width:
            measured.append(ids[200 : 200 + width])
        else:
            healing += [ids[i : i + piece] for i in range(0, min(len(ids), 4 * piece) - piece, piece)]
        if len(measured) == each and len(healing) >= pieces:
            break
    chunks = [torch.tensor([ids]) for i in range(each) for ids in (prose[0][i * width : (i + 1) * width], measured[i])]
    more = [prose[1][i * piece : (i + 1) * piece] for i in range(len(prose[1]) // piece)]
    if len(more) < pieces or len(healing) < pieces:
        raise SystemExit(f"{len(more)} and {len(healing)} pieces of text to heal on; {pieces} of each are needed")
    return chunks[:count], [torch.tensor(ids) for pair in zip(more[:pieces], healing[:pieces], strict=True) for ids in pair]


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All but the head, by name."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head")


@torch.no_grad()
def off_grid(model: nn.Module) -> float:
    """Distance from the 16 levels between the extremes of each 32 weights, root mean square in steps (uniform: .29), median."""
    found = []
    for _, layer in linears(model):
        blocks = layer.weight.detach().unflatten(-1, (-1, 32))
        low, high = blocks.aminmax(dim=-1, keepdim=True)
        at = (blocks - low) / ((high - low) / 15).clamp(min=1e-12)
        found.append(float((at - at.round()).square().mean().sqrt()))
    return statistics.median(found)


def heal(model: nn.Module, pieces: list[Tensor], seed: int, sizes: Sizes) -> list[float]:
    """Dither, then fine-tune, in place; the losses of the steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in linears(model):
            blocks = layer.weight.unflatten(-1, (-1, 32))
            low, high = blocks.aminmax(dim=-1, keepdim=True)
            layer.weight += ((torch.rand(blocks.shape, generator=generator) - 0.5) * ((high - low) / 15)).flatten(-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    order = torch.randperm(sizes.steps * sizes.batch[0], generator=generator).tolist()
    losses = []
    model.train()
    for step in range(sizes.steps):
        ids = torch.stack([pieces[i] for i in order[step * sizes.batch[0] : (step + 1) * sizes.batch[0]]])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"  healing {step + 1}/{sizes.steps}: {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses


class Inputs:
    """Rounds layers' inputs; the layers that share one (query, key and value; gate and up) share the work."""

    def __init__(self) -> None:
        self.rule: Callable[[Tensor], Tensor] | None = None
        self.seen: Tensor | None = None
        self.rounded = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self.rule is None:
            return x.bfloat16()
        if x is not self.seen:
            self.seen, self.rounded = x, self.rule(x.float()).bfloat16()
        return self.rounded


class Rounded(nn.Module):
    """A linear layer without bias: inputs and weights rounded, then multiplied in bfloat16."""

    def __init__(self, layer: nn.Linear, inputs: Inputs) -> None:
        super().__init__()
        self.exact, self.inputs = layer.weight.detach(), inputs
        self.weight = self.exact.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.inputs(x), self.weight)


def weight_rule(row: str, importance: Importance) -> Callable[[str, Tensor], Tensor] | None:
    """From a layer's name and weights to what is stored of them."""
    if row == "unrounded":
        return None
    if row == "NVFP4":
        return lambda name, w: nvfp4.fake_quantize(w)
    if row.startswith("NF4"):
        from bitsandbytes import functional as bnb

        def nf4(name: str, w: Tensor) -> Tensor:
            packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
            return bnb.dequantize_4bit(packed, state).float()

        return nf4
    fmt = FORMATS[row]
    if row == "MBS-H importance":
        return lambda name, w: codec.dequantize(codec.quantize(w, fmt, importance=importance.of(name, w.shape[-1])))
    return lambda name, w: codec.fake_quantize(w, fmt)


def input_rule(row: str, bits: int) -> Callable[[Tensor], Tensor] | None:
    """From a layer's inputs to what it sees of them."""
    if bits == 16 or row == "unrounded" or row.startswith("NF4"):
        return None
    if row == "NVFP4":
        return nvfp4.fake_quantize
    fmt = FORMATS[row].activations
    return lambda x: codec.fake_quantize(x, fmt)


def decibels(signal: Tensor, found: Tensor) -> float:
    """Of the signal over the difference."""
    return 10 * math.log10(float(signal.double().square().sum()) / float((found - signal).double().square().sum()))


class Model:
    """A model whose linear layers can be rounded in any of the formats."""

    def __init__(self, model: Any, importance: Importance, chunks: list[Tensor]) -> None:
        self.model, self.importance, self.inputs = model, importance, Inputs()
        self.met = self._watch(chunks)
        self.layers: dict[str, Rounded] = {}
        for name, layer in list(linears(model)):
            self.layers[name] = Rounded(layer, self.inputs)
            model.set_submodule(name, self.layers[name])

    @torch.no_grad()
    def _watch(self, chunks: list[Tensor]) -> dict[str, list[Tensor]]:
        """What the layers of every third block meet, in full precision."""
        met: dict[str, list[Tensor]] = {}
        watched = [(name, layer) for name, layer in linears(self.model) if int(name.split(".")[2]) % 3 == 0]
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, name=name: met.setdefault(name, []).append(args[0]))
            for name, layer in watched
        ]
        for chunk in chunks:
            self.model.model(input_ids=chunk)
        for hook in hooks:
            hook.remove()
        return met

    @torch.no_grad()
    def round(self, row: str, activations: int) -> dict[str, Any]:
        """Take the format on; the signal-to-noise ratios of weights (median over layers) and outputs."""
        rule, self.inputs.rule = weight_rule(row, self.importance), input_rule(row, activations)
        weights, outputs = [], []
        shared: dict[int, Tensor] = {}
        for name, layer in self.layers.items():
            stored = layer.exact if rule is None else rule(name, layer.exact)
            layer.weight = stored.bfloat16()
            if rule is None:
                continue
            weights.append(decibels(layer.exact, stored))
            for x in self.met.get(name, ()):
                if id(x) not in shared:  # layers with one input were given one tensor
                    shared[id(x)] = x if self.inputs.rule is None else self.inputs.rule(x)
                exact = nn.functional.linear(x[:, 1:], layer.exact)
                outputs.append(decibels(exact, nn.functional.linear(shared[id(x)][:, 1:], stored)))
        self.inputs.seen = None
        if rule is None:
            return {}
        return {"weight_qsnr": statistics.median(weights), "output_snr": statistics.median(outputs)}

    @torch.no_grad()
    def nll(self, chunk: Tensor) -> float:
        """Mean loss of the tokens after the first."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=chunk[:, :-1]).last_hidden_state
        self.inputs.seen = None
        logits = nn.functional.linear(hidden[0].float(), self.model.lm_head.weight)
        return float(nn.functional.cross_entropy(logits, chunk[0, 1:]))


class Kept:
    """Files under a folder, of one state of the codec."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        sources = sorted((ROOT / "kernels" / "mxfp4_plus").glob("*.py"))
        said = repr((sizes.length, sizes.steps, sizes.batch)).encode()
        self.folder = folder / hashlib.sha256(b"".join(p.read_bytes() for p in sources) + said).hexdigest()[:12]
        self.folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> dict[str, Any]:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def keep(self, name: str, found: dict[str, Any]) -> None:
        spare = self.folder / f"{name}.new"
        spare.write_text(json.dumps(found), "utf-8")
        spare.replace(self.folder / f"{name}.json")


def built(part: Part, pieces: list[Tensor], chunks: list[Tensor], sizes: Sizes, kept: Kept) -> tuple[Model, dict[str, Any]]:
    """The part's model, healed now or read, and what is to be said of it."""
    path = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    label = "raw_model" if part.seed is None else f"healed_{part.seed}"
    said, file = kept.read(label), kept.folder / f"{label}.pt"
    if part.seed is not None:
        if file.is_file() and said:
            model.load_state_dict(torch.load(file))
        else:
            said = {"healing": heal(model, pieces, part.seed, sizes)}
            torch.save(model.state_dict(), file)
    said["off_grid"] = off_grid(model)
    kept.keep(label, said)
    means = kept.folder / f"{label}.safetensors"
    if not means.is_file():
        calibrate(model, [{"input_ids": ids[None]} for ids in pieces[-8:]], means)
    return Model(model, read_importance(str(means)), [chunk[:, :512] for chunk in chunks[:2]]), said


def measured(part: Part, pieces: list[Tensor], chunks: list[Tensor], sizes: Sizes, kept: Kept) -> dict[str, Any]:
    """Losses by chunk of every format of a part; those kept are not measured again."""
    found = kept.read(part.name)
    todo = [row for row in part.rows if len(found.get(row, {}).get("nll", ())) < part.chunks]
    if not todo:
        return found
    model, said = built(part, pieces, chunks, sizes, kept)
    found["model"] = said
    for row in todo:
        entry = {**model.round(row, part.activations), "nll": found.get(row, {}).get("nll", [])}
        for chunk in chunks[len(entry["nll"]) : part.chunks]:
            entry["nll"].append(model.nll(chunk))
            found[row] = entry
            kept.keep(part.name, found)
        print(f"{part.name}: {row:18} {statistics.fmean(entry['nll']):.4f}", flush=True)
    return found


def compared(found: dict[str, Any], activations: int) -> dict[str, Any]:
    """Perplexity, paired difference, share of the gap, intervals, of the rows that are whole."""
    whole = max(len(entry["nll"]) for name, entry in found.items() if name != "model")
    rows = {name: entry for name, entry in found.items() if name != "model" and len(entry["nll"]) == whole}
    nll = {name: torch.tensor(entry["nll"], dtype=torch.float64) for name, entry in rows.items()}
    draws = torch.randint(whole, (4000, whole), generator=torch.Generator().manual_seed(0))

    def interval(values: Tensor) -> list[float]:
        low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return [low, high]

    out: dict[str, Any] = {"chunks": whole, "model": found.get("model"), "rows": {}}
    for name, entry in rows.items():
        more = nll[name] - nll["unrounded"]
        row = {
            "bits": BITS[name], "perplexity": math.exp(float(nll[name].mean())), "dnll": float(more.mean()),
            "se": float(more.std() / math.sqrt(whole)),
        } | {key: entry[key] for key in ("weight_qsnr", "output_snr") if key in entry}  # fmt: skip
        # NF4 leaves the inputs alone: beside formats that round them it has no share of the gap.
        apart = ("unrounded", "OCP-32", "NVFP4") + (("NF4, weights only",) if activations == 4 else ())
        if name not in apart and {"OCP-32", "NVFP4"} <= nll.keys():
            top, bottom, here = (nll[key][draws].mean(-1) for key in ("OCP-32", "NVFP4", name))
            share = float((nll["OCP-32"] - nll[name]).mean() / (nll["OCP-32"] - nll["NVFP4"]).mean())
            row |= {
                "share": share, "share_interval": interval((top - here) / (top - bottom)),
                "over_nvfp4": math.exp(float((nll[name] - nll["NVFP4"]).mean())),
                "over_nvfp4_interval": interval((here - bottom).exp()),
            }  # fmt: skip
        out["rows"][name] = {**row, "nll": entry["nll"]}
    for better, worse in (("MBS-H", "MBS-S"), ("EVEN-32", "OCP-16"), ("MBS-H macro 64", "MBS-H"), ("MBS-H importance", "MBS-H")):
        if {better, worse} <= nll.keys():
            gap = nll[better] - nll[worse]
            out.setdefault("pairs", {})[f"{better} minus {worse}"] = [float(gap.mean()), float(gap.std() / math.sqrt(whole))]
    return out


def show(name: str, part: dict[str, Any]) -> None:
    """A table."""
    print(f"\n{name}, {part['chunks']} chunks")
    for row, v in sorted(part["rows"].items(), key=lambda item: -item[1]["dnll"]):
        text = f"{row:18} {v['bits']:7.4f} bits  ppl {v['perplexity']:7.3f}  dnll {v['dnll']:.4f}+-{v['se']:.4f}"
        if "share" in v:
            low, high = v["share_interval"]
            text += f"  share {v['share']:5.2f} [{low:.2f}, {high:.2f}]  over NVFP4 x{v['over_nvfp4']:.3f}"
        if "weight_qsnr" in v:
            text += f"  weights {v['weight_qsnr']:.2f} dB, outputs {v['output_snr']:.2f} dB"
        print(text)
    for pair, (gap, error) in part.get("pairs", {}).items():
        print(f"{pair}: {gap:+.4f}+-{error:.4f}")


def results_row(result: dict[str, Any]) -> ResultRow | None:
    """What stands on the results page."""
    parts = {name: part for name, part in result["models"].items() if "W4A16" not in name}
    whole = {name: part["rows"] for name, part in parts.items() if set(ORDER) <= part["rows"].keys()}
    healed = [rows["MBS-H"]["share"] for name, rows in whole.items() if name.startswith("healed")]
    if "healed 0" not in whole:
        return None  # still to be measured
    ordered = {name: sorted(ORDER, key=lambda n: -rows[n]["dnll"]) == list(ORDER) for name, rows in whole.items()}
    enough = whole["healed 0"]["MBS-H"]["share"] >= 0.85 and statistics.fmean(healed) >= 0.85

    def shares(row: str) -> str:
        return ", ".join(f"{name} {rows[row]['share']:.2f}" for name, rows in whole.items() if row in rows)

    main = whole["healed 0"]["MBS-H"]
    low, high = main["share_interval"]
    verdict = ("reproduced" if enough else "partly reproduced") if all(ordered.values()) else "not reproduced"
    return ResultRow(
        "W4A4: perplexity OCP-32 > OAS-16 > MBS-H > NVFP4, and MBS-H recovers at least .85 of the log gap from OCP-32 to NVFP4",
        "Qwen3-8B: the same order; MBS-H .85, OAS-16 .59 of the gap (read off its perplexities)",
        f"order holds on {sum(ordered.values())} of {len(ordered)} models; MBS-H {shares('MBS-H')} "
        f"(healed 0: [{low:.2f}, {high:.2f}], {main['over_nvfp4']:.3f} times NVFP4's perplexity); "
        f"with macro blocks of 64 {shares('MBS-H macro 64')}; with calibrated importance {shares('MBS-H importance')}; "
        f"OAS-16 {shares('OAS-16')}; EVEN-32 {shares('EVEN-32')}",
        verdict,  # type: ignore[arg-type]
    )


def main() -> None:
    """Measure part by part; what is there is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "hfplug_mxfp4_quality")
    parser.add_argument("--until", type=int, help="parts to measure, from the first; default all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else Sizes()
    with tempfile.TemporaryDirectory() as spare:
        kept = Kept(Path(spare) if arguments.quick else arguments.work, sizes)
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
        chunks, pieces = texts(tokenizer, sizes)
        result: dict[str, Any] = {"claim": str(__doc__).splitlines()[0], "model": model_label("smollm2"), "models": {}}
        result |= {"tokens_per_chunk": sizes.length, "healing_steps": sizes.steps}
        for part in sizes.parts[: arguments.until]:
            result["models"][part.name] = compared(measured(part, pieces, chunks, sizes, kept), part.activations)
            show(part.name, result["models"][part.name])
            if not arguments.quick:
                print(write("mxfp4_quality", result, results_row), flush=True)


if __name__ == "__main__":
    main()
