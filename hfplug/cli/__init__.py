"""The ``hfplug`` command. Each command imports what it needs, so that ``hfplug list`` stays free of torch."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import hfplug
from hfplug.errors import HfplugError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=hfplug.__doc__
)
train_app = typer.Typer(no_args_is_help=True, help="Train from a run file: stock TRL fields plus a plugins: section.")
app.add_typer(train_app, name="train")
probe_app = typer.Typer(no_args_is_help=True, help="Fit a SinkProbe on labelled answers, and judge answers with it.")
app.add_typer(probe_app, name="probe")

PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Entry point: an error hfplug raises on purpose is one line and exit code 2, never a trace."""
    try:
        app()
    except HfplugError as error:
        print(f"hfplug: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command("list")
def list_methods(as_json: Json = False) -> None:
    """List the installed methods, and the plugins that could not be loaded with the cause."""
    from hfplug.cli import show

    catalogue = hfplug.catalogue()
    print(json.dumps(show.as_json(catalogue), indent=2)) if as_json else show.listing(catalogue)


@app.command()
def info(name: str, as_json: Json = False) -> None:
    """Show one method: paper, fidelity, options with defaults, limits, example."""
    from hfplug.cli import show

    entry = hfplug.catalogue().get(name)
    print(json.dumps(show.entry_json(entry), indent=2)) if as_json else show.details(entry)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check the environment: versions against the proven set, upstream names hfplug relies on, broken plugins."""
    from hfplug.cli import health

    report = health.examine()
    print(json.dumps(report, indent=2)) if as_json else health.show(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def _train_command(task: str, words: str) -> None:
    @train_app.command(task, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, help=words)
    def command(
        context: typer.Context,
        run: Annotated[Path, typer.Argument(help="YAML run file.")],
        check: Annotated[bool, typer.Option("--check", help="Only check the run file.")] = False,
    ) -> None:
        from hfplug import training

        values = training.with_overrides(training.read_run(run), context.args)
        if check:
            chosen = training.parse(values, task).plugins
            print(f"{run}: valid; plugins: {', '.join(c.name for cs in chosen.values() for c in cs) or 'none'}")
            return
        result = training.train(values, task)
        print(f"saved to {result.output_dir}; `hfplug report {result.output_dir}` draws it")


for _task, _words in {
    "sft": "Supervised fine-tuning with TRL's SFTTrainer",
    "dpo": "Preference optimisation with TRL's DPOTrainer",
    "grpo": "Reinforcement learning with TRL's GRPOTrainer",
    "reward": "A reward model with TRL's RewardTrainer",
    "distill": "Distillation from a teacher with TRL's DistillationTrainer",
}.items():
    _train_command(
        _task,
        f"{_words}, or with a method that extends it (plugins: trainer:). Any field can be overridden: "
        "--max_steps 10 --plugins.tuner.r 16.",
    )


@app.command(context_settings=PASS_ON)
def run(context: typer.Context) -> None:
    """Run an unmodified script (or -m module) with hfplug active: hfplug run script.py ARGS..."""
    words = context.args
    if not words or words[0] in ("-h", "--help"):
        print("usage: hfplug run script.py ARGS...   |   hfplug run -m package.module ARGS...")
        raise typer.Exit(0 if words else 2)
    if words[0] == "-m":
        if len(words) < 2:
            raise hfplug.ConfigError("run -m needs a module name")
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = Path(words[0])
    if not script.is_file():
        raise hfplug.ConfigError(f"run: script {words[0]!r} does not exist")
    sys.argv = words
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter that a tuner of hfplug saved.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist.")],
    to: Annotated[str, typer.Option(help="The format.")] = "lora",
    base: Annotated[str | None, typer.Option(help="Base model to measure the difference on.")] = None,
    approximate: Annotated[bool, typer.Option("--approximate", help="Accept a measured approximation; needs --base.")] = False,
    as_json: Json = False,
) -> None:
    """Write an adapter as a plain LoRA that loads where hfplug is not installed."""
    from hfplug import exporting

    done = exporting.export(adapter, output, to=to, base=base, approximate=approximate)
    print(json.dumps(exporting.fields_of(done), indent=2) if as_json else done)


@app.command()
def merge(
    adapters: Annotated[list[str], typer.Argument(help="Folders or hub ids of LoRA adapters of one base model.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write; without it: the report alone.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the result; default: the method's.")] = None,
    weights: Annotated[str | None, typer.Option(help="One per adapter, commas between: 1,1,-0.5; default: all 1.")] = None,
    method: Annotated[str, typer.Option(help="A merge method: ctm, svd_merge, ...")] = "ctm",
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the method, key=value; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of what the method draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into one plain LoRA, from their folders alone, and say how far it is from their weighted sum."""
    from hfplug.cli import merging

    done = merging.merge(adapters, output, rank, weights, method, settings or [], seed)
    print(json.dumps(done.as_dict(), indent=2) if as_json else done)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder, hub id or alias (smollm2) of a model; only its configuration is read.")],
    patch: Annotated[str, typer.Argument(help="A patch: simplenorm, ...")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the patch, key=value; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a patch would do to a model: modules, parameters, bytes. Loads no weights."""
    from hfplug.cli import patching

    done = patching.plan(model, patch, settings or [])
    print(json.dumps(done.as_dict(), indent=2) if as_json else done)


DATA = Annotated[Path, typer.Argument(help="JSONL: prompt, answer, label (1: what is to be found, a wrong answer), question_id.")]
Model = Annotated[str, typer.Option(help="Folder, hub id or alias (smollm2) of the model that gave the answers.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts in the chat template of the tokenizer.")]
Batch = Annotated[int, typer.Option(help="Texts at a time.")]


@probe_app.command("fit")
def probe_fit(
    data: DATA,
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of SinkProbe, key=value; repeatable.")] = None,
    folds: Annotated[int, typer.Option(help="Folds by question to judge it and the baselines over; 0: none.")] = 5,
    seeds: Annotated[int, typer.Option(help="How often the folds are drawn.")] = 3,
    chat: Chat = False,
    batch_size: Batch = 8,
    as_json: Json = False,
) -> None:
    """Fit a probe, say how well it and the baselines tell held-out answers apart, and save it."""
    from hfplug.cli import probe

    done = probe.fit(data, model, output, settings or [], folds, seeds, chat, batch_size)
    print(json.dumps(done, indent=2)) if as_json else probe.show_fit(done)


@probe_app.command("score")
def probe_score(
    data: DATA,
    model: Model,
    probe_dir: Annotated[Path, typer.Option("--probe", help="Folder of a fitted probe.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL to write: the records with their probability.")],
    chat: Chat = False,
    batch_size: Batch = 8,
    as_json: Json = False,
) -> None:
    """Write how likely each answer has label 1."""
    from hfplug.cli import probe

    done = probe.score(data, model, probe_dir, output, chat, batch_size)
    print(json.dumps(done, indent=2)) if as_json else probe.show_score(done)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder a training run wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default: RUN_DIR/report.")] = None,
) -> None:
    """Draw a training run: one HTML page with pictures of loss, utilisation and attention sinks."""
    from hfplug.report import write_report

    print(write_report(run_dir, out))
