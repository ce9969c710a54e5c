"""Does SinkProbe tell right from wrong answers? SmolLM2-135M on short questions that Python itself can check.

Questions: sums, differences and products of small numbers, and what a line of Python gives, each after three solved examples of
its kind. The model answers greedily up to the end of the line; right is an exact match, so no judge is needed. For SinkProbe
and every baseline: AUROC for wrong answers over 5 folds by question x 3 seeds, the penalty chosen inside the training folds;
and the same probe with shuffled labels.

Expected, written before measuring: a 135 M model gets 30 to 60 % right, by kind of question above all; so any feature that
knows the kind (the length of the prompt already) is above one half, and the question is what sinks add. The paper finds
SinkProbe above the other detectors on question answering with models of 7 to 8 B; here it should be above log_det, bos_mass
and the lengths, and at least level with nll. Within one kind of question every detector will find it much harder.

Run by ``python benchmarks/sinkprobe_claim.py``; writes results/sinkprobe_claim.json. One thread, about ten minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import random
import time
from typing import Any

import _bench
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfplug.callbacks import SinkProbe, baselines, cross_validate, extract, groups_of
from hfplug.models import model_label, resolve_model

METHODS = ("sink_probe",)

SEEDS, FOLDS, NEW_TOKENS = (0, 1, 2), 5, 10
# A line of Python, and what it gives, by Python itself.
LINES = {
    "len({word!r})": lambda v: len(v["word"]),
    "{word!r}.upper()": lambda v: v["word"].upper(),
    "{word!r}[0]": lambda v: v["word"][0],
    "{word!r}[-1]": lambda v: v["word"][-1],
    "{word!r}[:3]": lambda v: v["word"][:3],
    "{a} % {b}": lambda v: v["a"] % v["b"],
    "{a} // {b}": lambda v: v["a"] // v["b"],
    "{a} > {b}": lambda v: v["a"] > v["b"],
    "max({a}, {b})": lambda v: max(v["a"], v["b"]),
    "sum([{a}, {b}])": lambda v: v["a"] + v["b"],
    "{word!r}.count({letter!r})": lambda v: v["word"].count(v["letter"]),
    "{word!r} + 's'": lambda v: v["word"] + "s",
}
WORDS = ("apple", "banana", "kitten", "python", "river", "letter", "window", "coffee", "garden", "monkey", "purple", "summer")


def problem(kind: str, draw: random.Random) -> tuple[str, str]:
    """A problem of a kind and its true answer."""
    if kind == "python":
        word = draw.choice(WORDS)
        values = {"word": word, "letter": draw.choice(word), "a": draw.randint(2, 30), "b": draw.randint(2, 9)}
        line = draw.choice(tuple(LINES))
        return f">>> {line.format(**values)}", str(LINES[line](values))
    a, b = (draw.randint(2, {"product": 12, "difference": 20, "sum": 60}[kind]) for _ in range(2))
    if kind == "difference":
        a, b = max(a, b), min(a, b)
    sign, truth = {"sum": ("+", a + b), "difference": ("-", a - b), "product": ("*", a * b)}[kind]
    return f"{a} {sign} {b} =", str(truth)


def question(kind: str, draw: random.Random) -> dict[str, Any]:
    """A problem after three solved ones."""
    between = "\n" if kind == "python" else " "
    shots = [problem(kind, draw) for _ in range(3)]
    asked, truth = problem(kind, draw)
    solved = "".join(f"{text}{between}{answer}\n" for text, answer in shots)
    prompt = f"{solved}{asked}" + ("\n" if kind == "python" else "")
    return {"prompt": prompt, "question_id": asked, "truth": truth, "kind": kind}


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Different questions, as many of each kind."""
    draw, found = random.Random(seed), {}
    kinds = ("sum", "difference", "product", "python")
    per_kind = dict.fromkeys(kinds, 0)
    for _ in range(100 * count):
        if len(found) == count:
            return list(found.values())
        kind = min(kinds, key=lambda k: per_kind[k])
        one = question(kind, draw)
        if one["question_id"] not in found:
            found[one["question_id"]] = one
            per_kind[kind] += 1
    raise SystemExit(f"there are not {count} different questions: {per_kind}")


@torch.no_grad()
def answered(model: Any, tokenizer: Any, asked: list[dict[str, Any]], batch: int = 16) -> list[dict[str, Any]]:
    """The questions with the model's greedy answers, as ids, and whether they are wrong."""
    out: list[dict[str, Any]] = []
    tokenizer.padding_side = "left"
    for begin in range(0, len(asked), batch):
        rows = asked[begin : begin + batch]
        inputs = tokenizer([r["prompt"] for r in rows], return_tensors="pt", padding=True)
        text = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        width = inputs["input_ids"].shape[1]
        for row, mask, ids in zip(rows, inputs["attention_mask"], text, strict=True):
            reply = ids[width:].tolist()
            words = [tokenizer.decode([token]) for token in reply]
            # Up to the end of the line, but for a line break at the very beginning.
            stop = next((i for i, w in enumerate(words) if i and ("\n" in w or reply[i] == tokenizer.eos_token_id)), len(reply))
            said = tokenizer.decode(reply[:stop], skip_special_tokens=True).strip()
            own = ids[:width][mask.bool()].tolist()
            wrong = int(said.strip("'\"") != row["truth"])
            out.append({**row, "prompt_ids": own, "answer_ids": reply[:stop], "said": said, "label": wrong})
    return out


def judge(probe: SinkProbe, tables: dict[str, Any], rows: list[dict[str, Any]], keep: np.ndarray) -> dict[str, Any]:
    """AUROC of each feature on some of the answers."""
    labels, groups = np.array([r["label"] for r in rows])[keep], np.array(groups_of(rows))[keep]
    found: dict[str, Any] = {"answers": len(labels), "wrong": float(labels.mean())}
    for name, one in baselines(probe).items():
        result = cross_validate(one, tables[name].values[keep], labels, groups, FOLDS, SEEDS)
        found[name] = {"mean": result.mean, "std": result.std, "folds": result.aurocs}
    control = cross_validate(probe, tables["sink"].values[keep], labels, groups, FOLDS, SEEDS, shuffle_labels=True)
    found["sink, labels shuffled"] = {"mean": control.mean, "std": control.std, "folds": control.aurocs}
    return found


def show(part: str, found: dict[str, Any]) -> None:
    """Print one part, best first, whichever way it went."""
    print(f"{part}: {found['answers']} answers, {100 * found['wrong']:.0f} % wrong")
    scored = {name: f for name, f in found.items() if isinstance(f, dict)}
    for name, one in sorted(scored.items(), key=lambda item: -item[1]["mean"]):
        print(f"  {name:<24} {one['mean']:.3f} ± {one['std']:.3f}", flush=True)


def results_row(result: dict[str, Any]) -> _bench.ResultRow:
    """What stands on the results page."""
    every = result["all"]
    told = {name: every[name] for name in ("sink", "lap_eig", "attn_eig", "log_det", "nll")}
    return _bench.ResultRow(
        "sinks tell wrong answers from right ones above the other detectors",
        "SinkProbe above the others on question answering, models of 7 to 8 B",
        "AUROC " + ", ".join(f"{name} {v['mean']:.3f} (sd {v['std']:.3f})" for name, v in told.items()),
        "reproduced" if told["sink"]["mean"] == max(v["mean"] for v in told.values()) else "not reproduced",
    )


def main() -> None:
    """Ask, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    start = time.perf_counter()
    rows = answered(model, tokenizer, questions(arguments.questions))
    asking = time.perf_counter() - start
    probe, start = SinkProbe(), time.perf_counter()
    probes = baselines(probe)
    tables = dict(zip(probes, extract(model, tokenizer, rows, list(probes.values())), strict=True))
    extracting = time.perf_counter() - start
    kinds = np.array([r["kind"] for r in rows])
    result: dict[str, Any] = {
        "model": model_label("smollm2"), "folds": FOLDS, "seeds": list(SEEDS), "options": probe.options,
        "seconds": {"answering": asking, "features of all probes": extracting},
        "wrong by kind": {k: float(np.mean([r["label"] for r in rows if r["kind"] == k])) for k in sorted(set(kinds.tolist()))},
        "examples": [{k: r[k] for k in ("question_id", "truth", "said", "label")} for r in rows[:8]],
        "all": judge(probe, tables, rows, np.ones(len(rows), dtype=bool)),
    }  # fmt: skip
    show("all", result["all"])
    for kind in sorted(set(kinds.tolist())):
        wrong = result["wrong by kind"][kind]
        if min(wrong, 1 - wrong) * (kinds == kind).sum() >= 25:  # enough of both for five folds
            result[f"{kind} alone"] = judge(probe, tables, rows, kinds == kind)
            show(f"{kind} alone", result[f"{kind} alone"])
    fitted = probe.fit(tables["sink"], [r["label"] for r in rows], groups_of(rows))
    layers = np.array([where[0] for where in fitted.support])
    result["support"] = {
        "weights": len(layers), "of": len(fitted.coef), "by third of the depth": np.histogram(layers, (0, 10, 20, 30))[0].tolist()
    }  # fmt: skip
    print("support:", result["support"], "wrong by kind:", result["wrong by kind"], "seconds:", result["seconds"])
    print("wrote", _bench.write("sinkprobe_claim", result, results_row))


if __name__ == "__main__":
    main()
