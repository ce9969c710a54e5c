"""The demo: a real language model, TRL's stock SFTTrainer, three methods switched on by name.

    python examples/demo.py --run examples/demo.yaml --model smollm2

Makes the data, asks a held-out question, trains, asks again, loads the saved adapter in a new process and asks
a third time, and writes a report with pictures. All settings are in the run file; `hfplug train sft RUN.yaml`
does the training step alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import demo_data
import reload
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hfplug
from hfplug.models import model_label, resolve_model
from hfplug.report import update_facts, write_report
from hfplug.training import parse_sft, read_run, train_sft

DEMO_DATA = "runs/demo_data"  # `dataset_name` of examples/demo.yaml: the only data this script makes itself
SAMPLE_TOPIC = "for"
TOLERANCE = 1e-5  # nats: reloading must not change the model
VERSIONS = ("hfplug", "torch", "transformers", "peft", "trl", "accelerate")

console = Console()


def say(text: str) -> None:
    """Announce a step."""
    console.rule(f"[bold]{text}", align="left")


def make_data(run: Mapping[str, Any], tokenizer: Any) -> str:
    """Write the demo's own data if the run asks for it; return one line about the data."""
    name = str(run.get("dataset_name") or "the datasets of the run file")
    if name != DEMO_DATA:
        return name
    rows = demo_data.build_rows(demo_data.token_counter(tokenizer))
    demo_data.write_jsonl(rows, Path(name))
    sizes = f"{len(rows['train'])} training answers, {len(rows['test'])} on held-out topics"
    return f"language reference that ships with Python {platform.python_version()}: {sizes}"


def sample_question(run: Any) -> str | None:
    """The question shown before and after: from the held-out rows, about `SAMPLE_TOPIC` if there is one."""
    data = reload.load_data(run)
    split = run.arguments["script"].dataset_test_split
    if split not in data:
        return None
    rows = list(data[split])
    return reload.question_of(next((row for row in rows if row.get("topic") == SAMPLE_TOPIC), rows[0]))


def first_answer(model_path: str, tokenizer: Any, question: str) -> str:
    """The untrained model's answer."""
    from transformers import AutoModelForCausalLM

    return reload.answer(AutoModelForCausalLM.from_pretrained(model_path), tokenizer, question)


def evaluation(trainer: Any) -> dict[str, dict[str, float]]:
    """Held-out loss and perplexity before and after training, from the trainer's own log."""
    if trainer.eval_dataset is None:
        return {}
    if not any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in trainer.state.log_history):
        trainer.evaluate()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    found = {"after": losses[trainer.state.global_step]}
    if 0 in losses:
        found["before"] = losses[0]
    return {when: with_perplexity(loss) for when, loss in sorted(found.items(), reverse=True)}


def with_perplexity(loss: float) -> dict[str, float]:
    """A loss in nats per token, and its perplexity."""
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def plugins_of(run: Any) -> list[dict[str, Any]]:
    """The methods of a checked run with their origin, for the report."""
    found = []
    for choices in run.plugins.values():
        for choice in choices:
            entry = hfplug.catalogue().get(choice.name)
            found.append(
                {
                    "kind": str(entry.method.kind),
                    "name": choice.name,
                    "distribution": entry.source.distribution,
                    "version": entry.source.version,
                    "options": dict(choice.options),
                }
            )
    return found


def reloaded(output_dir: Path, question: str | None) -> dict[str, Any]:
    """Run `examples/reload.py` on the saved adapter in a new process and return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).with_name("reload.py")), str(output_dir), "--out", str(out)]
        if question is not None:
            command += ["--question", question]
        subprocess.run(command, check=True, env={**os.environ, "TQDM_DISABLE": "1"})
        return dict(json.loads(out.read_text(encoding="utf-8")))


def show(facts: Mapping[str, Any]) -> None:
    """The final table."""
    table = Table(expand=True)
    for name in ("", "before training", "after training"):
        table.add_column(name, overflow="fold", ratio=2 if name else 1)
    before, after = (facts["evaluation"].get(when, {}) for when in ("before", "after"))
    for label, key, form in (("held-out loss", "loss", "{:.4f}"), ("perplexity", "perplexity", "{:.2f}")):
        table.add_row(label, *(form.format(side[key]) if side else "–" for side in (before, after)))
    parameters, seconds = facts["parameters"], facts["seconds"]
    share = 100 * parameters["trainable"] / parameters["total"]
    table.add_row("trainable parameters", "–", f"{parameters['trainable']:,} of {parameters['total']:,} ({share:.2g} %)")
    table.add_row("time", "–", f"training {seconds['training']:.0f} s, everything {seconds['everything']:.0f} s")
    for sample in facts["samples"]:
        table.add_section()
        # Text: a model may write square brackets, which rich would take for markup.
        table.add_row(*(Text(sample[key]) for key in ("question", "before", "after")))
    console.print(table)


def main() -> None:
    """Run the demo; exits with an error where the reloaded adapter is not the trained one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path(__file__).with_name("demo.yaml"), help="run file")
    parser.add_argument("--model", help="alias, Hub id or folder; default: the run file's model_name_or_path")
    options = parser.parse_args()
    started = time.monotonic()

    content = read_run(options.run)
    if options.model:
        content["model_name_or_path"] = options.model
    run = parse_sft(content)  # a mistake in the run file is said before anything is loaded

    say("Model and data")
    model_path = resolve_model(content["model_name_or_path"])
    import datasets
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()  # one bar is enough: the training's
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    data = make_data(content, tokenizer)
    console.print(f"{model_label(content['model_name_or_path'])}; {data}")
    question = sample_question(run)
    before = first_answer(model_path, tokenizer, question) if question is not None else ""
    if question is not None:
        console.print(Text(question, style="bold"), Text(before), sep="\n")

    say("Training")
    training_started = time.monotonic()
    result = train_sft(content)
    trained_for = time.monotonic() - training_started
    after = reload.answer(result.trainer.model, tokenizer, question) if question is not None else ""
    losses = evaluation(result.trainer)
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in result.trainer.model.parameters()]

    say("The saved adapter, in a new process")
    import yaml

    (result.output_dir / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    again = reloaded(result.output_dir, question)
    if losses and again["loss"] is not None:
        losses["reloaded"] = with_perplexity(again["loss"])

    sample = {"question": question, "before": before, "after": after, "reloaded": again["answer"]}
    facts = {
        "model": model_label(content["model_name_or_path"]),
        "data": data,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "plugins": plugins_of(run),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in VERSIONS},
        },
        "parameters": {
            "trainable": sum(size for size, trained in parameters if trained),
            "total": sum(size for size, _ in parameters),
        },
        "seconds": {"training": trained_for, "everything": time.monotonic() - started},
        "evaluation": losses,
        "samples": [sample] if question is not None else [],
    }
    update_facts(result.output_dir, facts)
    page = write_report(result.output_dir)
    show(facts)
    console.print(f"report: [bold]{page}[/]")

    if "reloaded" in losses:
        trained_loss, reloaded_loss = losses["after"]["loss"], losses["reloaded"]["loss"]
        if not abs(reloaded_loss - trained_loss) <= TOLERANCE:  # not: a loss that is not a number fails too
            sys.exit(
                f"the reloaded adapter has a held-out loss of {reloaded_loss:.6f}, the trained one {trained_loss:.6f}: "
                "they must be the same model"
            )
        console.print(f"the reloaded adapter is the trained one: held-out loss {reloaded_loss:.6f} in both processes")


if __name__ == "__main__":
    main()
