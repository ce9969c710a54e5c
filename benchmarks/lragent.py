"""One KV cache for four LoRA agents on SmolLM2-135M: bytes, time to the first token, what it changes; attention in two parts.

Four adapters (rank 8 on queries and values, the paper's setting) are trained for a few steps, each on a text of its own: once
each with a ``lora_A`` of its own, once with the first one's on the value projections, as mode ``base_lr`` needs.

quality: the first agent reads 1024 tokens, the others join; the next 128 tokens, teacher-forced, are compared with those of an
agent with a cache of its own: mean KL(own || shared). bytes: counted over the tensors against four caches, and against the count.
first_token: the agents take turns on one growing text (512 tokens, eight turns, four new tokens a turn); the sum of the times to
the first token of each turn, over that of four caches. attention: one layer of SmolLM2's shape, one query (decoding) and 64.

Expected, written before measuring. Bytes at N = 4: base .27, base_lr .26, full .25 of four caches, exact .97 or more (all layers
are adapted, so only the first is shared). KL: exact 0, then base < base_lr < full, as in the paper. First token: base about 1
(every agent still reads all), base_lr and full .3 to .4. Attention: in two parts 1.05 to 1.5 times plain attention, added up 1.5
to 4 times it, more for decoding and for larger ranks. (A first form for many queries, exact attention over [V | low], took 1.4 to
3.8 times plain attention in a short trial, where adding up took 1.0 to 1.4, and was given up.)

Run by ``python benchmarks/lragent.py [--stage quality|first_token|attention] [--quick]``; writes results/lragent.json. One
thread; the whole takes about twenty minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hfplug.attention import AttentionCall
from hfplug.kernels.lragent import LowRankValueCache, flash_lora_attention, tie_value_a
from hfplug.models import model_label, resolve_model

METHODS = ("lragent", "lora_lowrank")

AGENTS = ("planner", "actor", "critic", "editor")
TRAIN = ("argparse", "typing", "tarfile", "statistics")  # what each agent is trained on
READ = ("calendar", "difflib", "doctest")  # what all of them read
CONTEXT, NEW = 1024, 128


def ids_of(tokenizer: Any, name: str, skip: int = 200) -> torch.Tensor:
    """Tokens of a module of Python's library, ``(1, tokens)``."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text("utf-8")
    return torch.tensor([tokenizer(text).input_ids[skip:]])


def team(tokenizer: Any, steps: int, *, tied: bool) -> Any:
    """SmolLM2 with four trained adapters."""
    base = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(base, lora, adapter_name=AGENTS[0])
    for name in AGENTS[1:]:
        model.add_adapter(name, lora)
    for name, source in zip(AGENTS, TRAIN, strict=True):
        model.set_adapter(name)
        if tied and name != AGENTS[0]:
            tie_value_a(model, AGENTS[0], [name])
        text = ids_of(tokenizer, source)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        for step in range(steps):
            part = text[:, 256 * step % (text.shape[1] - 256) :][:, :256]
            loss = model(input_ids=part, labels=part).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{name}: loss {float(loss):.3f} after {steps} steps", flush=True)
    return model.eval()


def caches(model: Any, mode: str) -> dict[str, Any]:
    """A cache for each agent: of its own, or a view."""
    if mode == "separate":
        return {agent: DynamicCache(config=model.config) for agent in AGENTS}
    store = LowRankValueCache(model, mode=mode)
    return {agent: store.view(agent) for agent in AGENTS}


def held(found: dict[str, Any]) -> int:
    """Bytes of all tensors of these caches."""
    one = found[AGENTS[0]]
    if isinstance(one, DynamicCache):
        return sum(t.nbytes for cache in found.values() for layer in cache.layers for t in (layer.keys, layer.values))
    return int(one.store.nbytes)


def forward(model: Any, agent: str, cache: Any, ids: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """Log probabilities as ``agent`` of what its cache does not hold yet."""
    if model.active_adapter != agent:
        model.set_adapter(agent)
    out = model(input_ids=ids[:, cache.get_seq_length() :], cache=cache, logits_to_keep=keep)
    return out.logits.float().log_softmax(-1)


@torch.no_grad()
def quality(model: Any, tokenizer: Any, modes: tuple[str, ...], texts: int) -> dict[str, Any]:
    """KL to an agent with its own cache, by mode, over texts and the agents that did not write; bytes beside."""
    kl: dict[str, list[float]] = {mode: [] for mode in modes}
    size: dict[str, Any] = {}
    for name in READ[:texts]:
        text = ids_of(tokenizer, name)[:, : CONTEXT + NEW]
        own = caches(model, "separate")
        for agent in AGENTS:
            forward(model, agent, own[agent], text[:, :CONTEXT], 1)
        size["separate"] = held(own)
        expected = {agent: forward(model, agent, own[agent], text) for agent in AGENTS[1:]}
        for mode in modes:
            shared = caches(model, mode)
            store = shared[AGENTS[0]].store
            for agent in AGENTS[: 1 if store.together else None]:
                forward(model, agent, shared[agent], text[:, :CONTEXT], 1)
            size[mode] = held(shared)
            if size[mode] != store.formula_bytes():
                raise SystemExit(f"{mode}: {size[mode]} bytes are held, {store.formula_bytes()} were counted")
            for agent in AGENTS[1:]:
                found = forward(model, agent, shared[agent], text)
                kl[mode].append(float((expected[agent].exp() * (expected[agent] - found)).sum(-1).mean()))
                shared[agent].crop(-NEW)  # what the next agent reads has not been written yet
        print(name, {mode: round(values[-1], 5) for mode, values in kl.items()}, flush=True)
    return {
        "kl": {mode: {"mean": statistics.fmean(v), "values": v} for mode, v in kl.items()},
        "bytes": {mode: size[mode] / size["separate"] for mode in modes},
    }


@torch.no_grad()
def turns(model: Any, mode: str, prompt: torch.Tensor, count: int = 8, new: int = 4) -> float:
    """CPU seconds until the first token, summed over the turns."""
    text, found, spent = prompt, caches(model, mode), 0.0
    for turn in range(count):
        agent = AGENTS[turn % len(AGENTS)]
        begin = time.process_time()
        token = forward(model, agent, found[agent], text, 1).argmax(-1)
        spent += time.process_time() - begin
        for step in range(new):
            text = torch.cat((text, token), dim=1)
            if step + 1 < new:  # the last token is read by the next agent, as after generate
                token = forward(model, agent, found[agent], text, 1).argmax(-1)
    return spent


def first_token(model: Any, tokenizer: Any, modes: tuple[str, ...], repeats: int, length: int) -> dict[str, Any]:
    """Time to the first token over that of four caches, turn by turn of the measurement."""
    prompt = ids_of(tokenizer, READ[0])[:, :length]
    spent: dict[str, list[float]] = {mode: [] for mode in ("separate", *modes)}
    _bench.interleave({m: (lambda m=m: spent[m].append(turns(model, m, prompt))) for m in spent}, repeats)  # type: ignore[misc]
    # The warm-up is the first value of each; the order of the turns is the same for all.
    found = {mode: _bench.ratios(spent[mode][1:], spent["separate"][1:]) for mode in modes}
    print({mode: round(row["median"], 3) for mode, row in found.items()}, flush=True)
    return found


@torch.no_grad()
def attention(repeats: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """CPU time over that of plain attention, which knows nothing of adapters."""
    heads, groups, dim = 9, 3, 64
    result: dict[str, Any] = {}
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        key, value = torch.randn(2, 1, groups, length, dim, generator=generator).unbind()
        for queries in (1, 64):
            query = torch.randn(1, heads, queries, dim, generator=generator)
            for rank in (8, 16, 64):
                low, up = (
                    torch.randn(1, 1, length, rank, generator=generator),
                    torch.randn(groups, rank, dim, generator=generator),
                )

                def call(v: torch.Tensor, query: torch.Tensor = query, key: torch.Tensor = key) -> AttentionCall:
                    return AttentionCall(query=query, key=key, value=v, scaling=dim**-0.5)

                runs: dict[str, Callable[[], Any]] = {
                    "plain": lambda value=value, call=call: call(value).exact(),
                    "added up": lambda value=value, low=low, up=up, call=call: call(value + low @ up).exact(),
                    "in two parts": lambda value=value, low=low, up=up, call=call: flash_lora_attention(call(value), low, up),
                }
                times = _bench.interleave(runs, repeats)
                name = f"{length} keys, {queries} queries, rank {rank}"
                result[name] = {n: _bench.ratios(times[n].cpu, times["plain"].cpu) for n in ("added up", "in two parts")}
                print(name, {n: round(row["median"], 2) for n, row in result[name].items()}, flush=True)
    return result


def results_row(result: dict[str, Any]) -> _bench.ResultRow | None:
    """What stands on the results page."""
    if not all(stage in result for stage in ("quality", "tied", "first_token")):
        return None  # a stage has not run yet
    free, tied, first = result["quality"], result["tied"], result["first_token"]
    kl = {"base": free["kl"]["base"]["mean"], **{m: tied["kl"][m]["mean"] for m in ("base_lr", "full")}}
    own = tied["kl"]["base"]["mean"]
    told = (
        "reproduced"
        if own < kl["base_lr"] < kl["full"]
        else "partly reproduced"
        if kl["base_lr"] < kl["full"]
        else "not reproduced"
    )
    return _bench.ResultRow(
        "Four agents on one cache: a quarter of the bytes; KL to caches of their own: base < base_lr < full",
        "about 1/3 at three agents; HotpotQA 38.9 own, 38.6 base, 37.9 base_lr, 36.4 full (Llama-3.1-8B)",
        f"bytes {free['bytes']['base']:.2f} base, {tied['bytes']['base_lr']:.2f} base_lr; KL "
        + ", ".join(f"{m} {v:.4f}" for m, v in kl.items())
        + f" (base with tied A {own:.4f}); time to the first token {first['base']['median']:.2f} base, "
        f"{first['base_lr']['median']:.2f} base_lr",
        told,
    )


def main() -> None:
    """Run the stages; keep what other stages wrote before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("quality", "first_token", "attention"))
    parser.add_argument("--quick", action="store_true", help="fewer texts, steps and repeats; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick, steps = arguments.quick, 2 if arguments.quick else 12
    file = _bench.ROOT / "benchmarks" / "results" / "lragent.json"
    result = json.loads(file.read_text("utf-8")) if file.is_file() and not quick else {}
    result.pop("provenance", None)
    result |= {"model": model_label("smollm2"), "steps": steps}

    def keep(stage: str, found: dict[str, Any]) -> None:
        result[stage] = found
        if not quick:
            _bench.write("lragent", result, results_row)

    if arguments.stage in (None, "attention"):
        keep("attention", attention(3 if quick else 9, (2048,) if quick else (8192, 16384, 32768)))
    if arguments.stage == "attention":
        return
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    texts = 1 if quick else len(READ)
    if arguments.stage in (None, "quality"):
        keep("quality", quality(team(tokenizer, steps, tied=False), tokenizer, ("exact", "base", "full"), texts))
    model = team(tokenizer, steps, tied=True)
    if arguments.stage in (None, "quality"):
        keep("tied", quality(model, tokenizer, ("base", "base_lr", "full"), texts))
    if arguments.stage in (None, "first_token"):
        keep("first_token", first_token(model, tokenizer, ("base", "base_lr", "full"), *((1, 64) if quick else (5, 512))))


if __name__ == "__main__":
    main()
