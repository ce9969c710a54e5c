"""``hfplug drift collect``; imports torch only when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Rollouts for DRIFT.")


@app.callback()
def _group() -> None:
    """Keeps ``collect`` a command of its own while it is the only one."""


@app.command()
def collect(
    prompts: Annotated[Path, typer.Argument(help="JSONL: prompt (text or chat messages), answer or what the verifier reads.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL to write; it must not exist.")],
    model: Annotated[str, typer.Option(help="Folder, Hub id or alias (smollm2) of the model that will be trained.")],
    verifier: Annotated[str, typer.Option(help="answer_match, or package.module:function of yours.")] = "answer_match",
    backend: Annotated[str, typer.Option(help="model (transformers) or vllm.")] = "model",
    samples: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 16,
    max_turns: Annotated[int, typer.Option(help="Turns per rollout at most.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="Of sampling, > 0.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of sampling, in (0, 1].")] = 1.0,
    feedback: Annotated[str, typer.Option(help="What the user says after a failure.")] = "Incorrect. Please think again.",
    format_penalty: Annotated[float, typer.Option(help="Added to the return per badly formatted turn.")] = -0.1,
    batch_size: Annotated[int, typer.Option(help="Conversations at a time (backend model).")] = 16,
    limit: Annotated[int | None, typer.Option(help="Use only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Sample multi-turn rollouts of a model, judge every turn, and write them for DRIFTTrainer."""
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    done = run(
        prompts, output, model, verifier, backend, options, limit, batch_size,
        n=samples, max_turns=max_turns, feedback=feedback, format_penalty=format_penalty, seed=seed,
    )  # fmt: skip
    if as_json:
        print(json.dumps(done, indent=2))  # noqa: T201  a command talks
        return
    print(  # noqa: T201
        f"{done['rollouts']} rollouts of {done['prompts']} prompts written to {done['output']}; solved {done['solved']:.3f}, at "
        f"the first turn {done['solved_first']:.3f}; prompts never solved: {done['never_solved']}; "
        f"effective sample size at beta .1: {done['effective_sample_size']:.1f}"
    )


def run(
    prompts: Path,
    output: Path,
    model: str,
    verifier: str,
    backend: str,
    options: dict[str, Any],
    limit: int | None,
    batch_size: int,
    **collecting: Any,
) -> dict[str, Any]:
    """Collect; everything that can be wrong without the model is looked at before it is loaded.

    Returns:
        ``output``, ``rollouts``, ``prompts``, shares ``solved`` and ``solved_first`` of rollouts, ``never_solved`` prompts,
        ``effective_sample_size`` of the weights by default options.

    Raises:
        ConfigError: files, options or names that are wrong.
        UnsupportedError: vLLM asked for and not installed.
    """
    from hfplug.errors import ConfigError, nearest
    from hfplug.trainers.drift.collect import DriftRolloutCollector
    from hfplug.trainers.drift.data import read_lines, to_drift_dataset, write_rollouts
    from hfplug.trainers.drift.weights import effective_sample_size

    backends = {"model": _model_generator, "vllm": _vllm_generator}
    if backend not in backends:
        raise ConfigError(f"--backend {backend!r} is not one of {sorted(backends)}{nearest(backend, backends)}")
    if output.exists():
        raise ConfigError(f"--output {str(output)!r} exists already")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} must be >= 1")
    rows = [row for _, row in read_lines(prompts)][:limit]
    if not rows:
        raise ConfigError(f"{str(prompts)!r} holds no prompts")
    judge = _verifier(verifier)
    collector = DriftRolloutCollector(lambda *_, **__: [], judge, **collecting)  # its options, before a model is loaded
    collector.generate = backends[backend](model, options, batch_size)
    rollouts = write_rollouts(output, collector.collect(rows))
    weights = [row["weight"] for row in to_drift_dataset(rollouts)]
    solved = [max(r["turn_rewards"]) >= collector.success_reward for r in rollouts]
    ever = {r["prompt_id"] for r, ok in zip(rollouts, solved, strict=True) if ok}
    return {
        "output": str(output),
        "rollouts": len(rollouts),
        "prompts": len(rows),
        "solved": sum(solved) / len(rollouts),
        "solved_first": sum(r["turn_rewards"][0] >= collector.success_reward for r in rollouts) / len(rollouts),
        "never_solved": len(rows) - len(ever),
        "effective_sample_size": effective_sample_size(weights),
    }


def _verifier(name: str) -> Any:
    import importlib
    import sys

    from hfplug.errors import ConfigError, nearest
    from hfplug.trainers.drift import verify

    if name == "answer_match":
        return verify.answer_match
    module, found, attribute = name.partition(":")
    if not found or not module or not attribute:
        raise ConfigError(
            f"--verifier {name!r}{nearest(name, ['answer_match'])} is neither answer_match nor package.module:function"
        )
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--verifier {name!r}: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(getattr(loaded, attribute, None)):
        raise ConfigError(f"--verifier {name!r}: {module} has no function {attribute!r}{nearest(attribute, vars(loaded))}")
    return getattr(loaded, attribute)


def _model_generator(model: str, options: dict[str, Any], batch_size: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hfplug.models import resolve_model
    from hfplug.trainers.drift.generators import ModelGenerator, check_sampling

    check_sampling(**options)
    source = resolve_model(model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ModelGenerator(loaded.to(device), tokenizer, batch_size=batch_size, **options)


def _vllm_generator(model: str, options: dict[str, Any], batch_size: int) -> Any:  # it makes its own batches
    from hfplug.models import resolve_model
    from hfplug.trainers.drift.generators import VLLMGenerator

    return VLLMGenerator(str(resolve_model(model)), **options)
