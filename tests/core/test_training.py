"""Run files: everything wrong is said before a model is loaded; what is right trains with all kinds of plugins at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfplug import training
from hfplug.errors import ConfigError

GOOD: dict[str, Any] = {
    "model_name_or_path": "nowhere/at-all",
    "datasets": [{"path": "json", "data_files": "nowhere.jsonl"}],
    "output_dir": "unused",
    "bf16": False,
    "report_to": "none",
    "plugins": {
        "tuner": {"type": "ulora", "r": 4},
        "loss": {"type": "nitp", "weight": 0.5},
        "callbacks": ["sink_monitor"],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    out = json.loads(json.dumps(GOOD))
    *parents, last = path.split("/")
    place = out
    for part in parents:
        place = place[part]
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    return out


def test_a_good_run_is_parsed_without_touching_model_or_data() -> None:
    run = training.parse_sft(GOOD)
    assert run.plugins["tuner"][0].config.r == 4
    assert run.plugins["loss"][0].config.weight == 0.5
    assert [c.name for c in run.plugins["callbacks"]] == ["sink_monitor"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("lerning_rate", 1e-4, ["'lerning_rate'", "'learning_rate'"]),
        ("plugin", {}, ["'plugin'", "'plugins'"]),
        ("max_steps", "lots", ["max_steps", "'lots'", "int"]),
        ("eval_strategy", False, ["eval_strategy", "False", "quotes"]),
        ("model_name_or_path", None, ["model_name_or_path"]),
        ("datasets", None, ["datasets", "dataset_name"]),
        ("datasets", [{"pat": "json"}], ["datasets[0]", "'pat'", "'path'"]),
        ("plugins/tuner/type", "ulra", ["'ulra'", "'ulora'"]),
        ("plugins/tuner/rank", 3, ["plugins.tuner", "'rank'"]),
        ("plugins/tuner/r", "four", ["plugins.tuner", "r='four'", "int"]),
        ("plugins/tuner/r", 0, ["plugins.tuner", "r=0", "> 0"]),
        ("plugins/tuner/context", "casual", ["'casual'", "'causal'"]),
        ("plugins/tuner", {"r": 4}, ["plugins.tuner", "'type'"]),
        ("plugins/tuner", "nitp", ["'nitp'", "loss", "tuner"]),
        ("plugins/loss/weight", "much", ["plugins.loss", "'much'"]),
        ("plugins/callback", "sink_monitor", ["'callback'", "'callbacks'"]),
        ("plugins/attention", "ulora", ["'ulora'", "tuner", "attention"]),
        ("plugins/cache", "ulora", ["'ulora'", "cache"]),
        ("plugins/tuner", ["ulora", "ulora"], ["plugins.tuner", "one method"]),
        ("plugins/patches", ["simplenrm"], ["'simplenrm'", "'simplenorm'"]),
        ("plugins/patches", [{"type": "simplenorm", "epsilon": 1e-6}], ["plugins.patches", "'epsilon'", "'eps'"]),
        ("plugins/patches", "nitp", ["'nitp'", "loss", "patch"]),
    ],
)
def test_b22_what_is_wrong_is_said_with_the_nearest_name(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        training.parse_sft(changed(path, value))
    for word in words:
        assert word in str(caught.value)


def test_overrides_reach_into_plugins_and_are_typed() -> None:
    words = ["--max_steps", "7", "--plugins.tuner.r=16", "--plugins.loss.weight", "2.5", "--learning_rate", "3e-4"]
    run = training.parse_sft(training.with_overrides(GOOD, words))
    assert run.arguments["training"].max_steps == 7
    assert run.arguments["training"].learning_rate == pytest.approx(3e-4)
    assert run.plugins["tuner"][0].config.r == 16
    assert run.plugins["loss"][0].config.weight == 2.5
    assert GOOD["plugins"]["tuner"]["r"] == 4  # the given mapping is left alone


@pytest.mark.parametrize("words", [["max_steps", "3"], ["--max_steps"], ["--model_name_or_path.r", "3", "--learning_rate.x=1"]])
def test_malformed_overrides_are_refused(words: list[str]) -> None:
    run = {**GOOD, "learning_rate": 1e-4}
    with pytest.raises(ConfigError):
        training.with_overrides(run, words)


def test_run_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: [1,")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        training.read_run(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="mapping"):
        training.read_run(tmp_path / "list.yaml")
    with pytest.raises(ConfigError, match=r"did you mean 'run\.yaml'"):
        training.read_run(tmp_path / "run.yml")


@pytest.fixture
def tiny_run(tmp_path: Path) -> dict[str, Any]:
    from hfplug.testing.models import tiny_llama, tiny_tokenizer

    model = tmp_path / "model"
    tiny_llama().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    answers = [" ".join(f"w{5 + (i * k) % 50}" for k in range(8)) for i in range(16)]
    rows = [{"prompt": f"w{3 + i} w{4 + i} ", "completion": answer} for i, answer in enumerate(answers)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    return {
        "model_name_or_path": str(model),
        "dataset_name": "json",
        "datasets": [{"path": "json", "data_files": files["train"]}],
        "output_dir": str(tmp_path / "run"),
        "max_steps": 4,
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "plugins": {
            "tuner": {"type": "ulora", "r": 4, "target_modules": "all-linear"},
            "loss": {"type": "nitp", "weight": 0.5},
            "callbacks": [{"type": "sink_monitor", "every": 1}],
        },
    }


RELOAD = """
import json, sys
import hfplug, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[1, 5, 9, 12]])
with torch.no_grad():
    print("LOGITS", json.dumps(model(ids).logits.double().flatten().tolist()))
"""


def test_a_run_trains_with_three_kinds_of_plugins_and_reloads_in_a_fresh_process(tiny_run: dict[str, Any]) -> None:
    import torch

    result = training.train_sft({k: v for k, v in tiny_run.items() if k != "dataset_name"})
    logged = [entry for entry in result.trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert 0 < entry["nitp/loss"] < 2
        assert 0 <= entry["sink/mass/layer_00"] <= 1
    groups = result.trainer.optimizer.param_groups
    assert sorted({round(g["initial_lr"] / 1e-2) for g in groups}) == [1, 5]

    model = result.trainer.model.eval()
    ids = torch.tensor([[1, 5, 9, 12]])
    with torch.no_grad():
        here = model(ids).logits
        with model.disable_adapter():
            base = model(ids).logits
    assert not torch.equal(here, base)
    done = subprocess.run([sys.executable, "-c", RELOAD, str(result.output_dir)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("LOGITS "))
    assert json.loads(line.removeprefix("LOGITS ")) == here.double().flatten().tolist()


def test_a_run_patches_the_model_and_saves_what_comes_back_patched(tiny_run: dict[str, Any]) -> None:
    import torch

    import hfplug

    quantised = {**tiny_run, "load_in_4bit": True, "plugins": {"patches": "simplenorm"}}
    with pytest.raises(ConfigError, match="load_in_4bit"):
        training.parse_sft(quantised)
    run = {k: v for k, v in tiny_run.items() if k != "dataset_name"}
    run["plugins"] = {"patches": [{"type": "simplenorm", "eps": 1e-6}], "loss": "nitp"}
    with pytest.warns(UserWarning, match="retrain"):
        result = training.train_sft(run)
    model = result.trainer.model.eval()
    assert hfplug.applied(model)[0].patch.eps == 1e-6
    gains = [p for n, p in model.named_parameters() if n.endswith("_proj.norm.weight")]
    assert gains
    assert all((g != 1).any() for g in gains)  # the optimizer has them
    ids = torch.tensor([[1, 5, 9, 12]])
    with torch.no_grad():
        here = model(ids).logits
    done = subprocess.run([sys.executable, "-c", RELOAD, str(result.output_dir)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("LOGITS "))
    assert json.loads(line.removeprefix("LOGITS ")) == here.double().flatten().tolist()
