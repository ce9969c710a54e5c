"""A stranger's distribution (tests/stranger_plugin): installed, discovered, held to the contracts, uninstalled again."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRANGER = ROOT / "tests" / "stranger_plugin"

SAVE = """
import sys
import hfplug
from peft import get_peft_model
from hfplug.testing.models import tiny_llama
from hfplug.tuners import RowScaleConfig
from hfplug.callbacks import TokenCounterCallback
tiny_llama().save_pretrained(sys.argv[1] + "/base")
model = get_peft_model(tiny_llama(), RowScaleConfig(target_modules=["q_proj"]))
model.save_pretrained(sys.argv[1] + "/adapter")
"""
LOAD = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base")
PeftModel.from_pretrained(base, sys.argv[1] + "/adapter")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that sees this one's packages and this checkout, and has the stranger."""
    folder = tmp_path_factory.mktemp("stranger") / "env"
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    here = [p for p in site.getsitepackages() if p.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join([*here, str(ROOT)]) + "\n")
    source = tmp_path_factory.mktemp("source")
    for path in STRANGER.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            (source / path.relative_to(STRANGER)).parent.mkdir(parents=True, exist_ok=True)
            (source / path.relative_to(STRANGER)).write_bytes(path.read_bytes())
    # The one that comes with a new environment may be too old, and hides the one shared.
    run(found, "-m", "pip", "uninstall", "--quiet", "-y", "setuptools", cwd=source)
    run(found, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(source), cwd=source)
    return found


def run(python: Path, *words: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HFPLUG_"))}
    done = subprocess.run([str(python), *words], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def methods(python: Path, cwd: Path) -> dict[str, str]:
    listed = json.loads(run(python, "-m", "hfplug", "list", "--json", cwd=cwd).stdout)
    assert listed["problems"] == []
    return {m["name"]: f"{m['distribution']} {m['version']}" for m in listed["methods"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_strangers_plugin_from_install_to_uninstall(python: Path, tmp_path: Path) -> None:
    found = methods(python, tmp_path)
    assert found["rowscale"] == found["token_counter"] == "hfplug-stranger 0.3.1"

    (tmp_path / "test_contract.py").write_bytes((STRANGER / "contract" / "test_contract.py").read_bytes())
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contract.py", cwd=tmp_path)
    assert "failed" not in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 50

    run(python, "-c", SAVE, str(tmp_path), cwd=tmp_path)
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["hfplug"]
    assert (record["plugin"], record["distribution"], record["version"]) == ("rowscale", "hfplug-stranger", "0.3.1")
    run(python, "-c", "import hfplug" + LOAD, str(tmp_path), cwd=tmp_path)

    run(python, "-m", "pip", "uninstall", "--quiet", "-y", "hfplug-stranger", cwd=tmp_path)
    assert "rowscale" not in methods(python, tmp_path)
    with_hfplug = run(python, "-c", "import hfplug" + LOAD, str(tmp_path), cwd=tmp_path, check=False)
    assert "MissingPluginError" in with_hfplug.stderr
    assert 'pip install "hfplug-stranger>=0.3.1"' in with_hfplug.stderr
    stock = run(python, "-c", LOAD, str(tmp_path), cwd=tmp_path, check=False)
    assert stock.returncode != 0  # never read as plain LoRA
    assert "ROWSCALE" in stock.stderr


def test_the_environment_of_this_test_is_not_the_strangers() -> None:
    done = subprocess.run([sys.executable, "-m", "hfplug", "list", "--json"], capture_output=True, text=True, check=True)
    assert "rowscale" not in done.stdout
