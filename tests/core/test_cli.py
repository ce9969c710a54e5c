"""The command: listing without torch, errors in one line, unmodified scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """import sys, atexit
atexit.register(lambda: print('HEAVY', sorted({'torch', 'transformers', 'peft'} & set(sys.modules))))
"""


def run(*words: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    program = f"{code}from hfplug.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )


def test_list_names_every_method_and_loads_nothing_heavy() -> None:
    done = run("list", "--json", code=PROBE)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    methods = {m["name"]: m for m in json.loads(done.stdout.split("HEAVY")[0])["methods"]}
    assert methods["ulora"]["paper"]["fidelity"] == "our reading"
    assert {m["kind"] for m in methods.values()} >= {"tuner", "loss", "callback"}


def test_list_shows_disabled_plugins_no_longer() -> None:
    done = run("list", "--json", HFPLUG_DISABLE="ulora")
    assert "ulora" not in [m["name"] for m in json.loads(done.stdout)["methods"]]


def test_info_shows_where_other_plugins_may_add_and_what_they_offer() -> None:
    text = run("info", "sa_dpo").stdout
    for words in ("extension point", "surrogate", "hinge: max(0, 1 - u)", "sa_dpo_length_normalized"):
        assert words in text
    assert "extension point" not in run("info", "ulora").stdout


def test_info_shows_paper_options_and_limits() -> None:
    done = run("info", "ulora", "--json")
    shown = json.loads(done.stdout)
    options = {row["name"]: row for row in shown["options"]}
    assert options["ema_decay"]["default"] == "0.99"
    assert options["ema_decay"]["help"]
    assert "peft_version" not in options
    assert shown["limits"]
    text = run("info", "ulora").stdout
    assert "our reading" in text
    assert "gate_range" in text


def test_unknown_method_is_one_line_with_the_nearest_name() -> None:
    done = run("info", "ulra")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("hfplug: unknown method 'ulra' (did you mean 'ulora'?)")
    assert "Traceback" not in done.stderr


def test_doctor_is_healthy_here() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["healthy"], report
    assert done.returncode == 0


def test_b21_doctor_names_who_is_affected_by_a_missing_upstream_name() -> None:
    remove = "import peft.tuners.tuners_utils as t; del t._get_in_out_features\n"
    # the seams import the name too, so the tuner drops out of the catalogue with a cause, and doctor says both
    done = run("doctor", "--json", code=remove)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    missing = {row["name"]: row["owner"] for row in report["missing"]}
    assert missing["peft.tuners.tuners_utils:_get_in_out_features"] == "ulora"


def test_b23_list_and_doctor_work_when_transformers_cannot_be_imported(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('Either a revision or a version must be specified')\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    assert run("list", **path).returncode == 0
    done = run("doctor", **path)
    assert done.returncode == 1
    assert "import transformers fails" in done.stdout
    assert "Either a revision or a version must be specified" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr


SCRIPT = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
from peft import get_peft_config, get_peft_model
import peft
config = get_peft_config({"peft_type": "ULORA", "r": 2, "target_modules": ["q_proj"]})
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=2))
print(type(get_peft_model(model, config).base_model).__name__, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_run_activates_an_unmodified_script(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "stock_script.py").write_text(SCRIPT)
    words = ["-m", "stock_script"] if as_module else [str(tmp_path / "stock_script.py")]
    done = subprocess.run(
        [sys.executable, "-m", "hfplug", "run", *words, "--flag", "x"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert "ULoraModel ['--flag', 'x'] __main__" in done.stdout, done.stderr


def test_run_refuses_a_missing_script() -> None:
    done = run("run", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
