"""``hfplug probe``: fitting and judging from files, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hfplug.cli import app
from hfplug.errors import HfplugError
from hfplug.testing import models

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, and answers whose label is in their length."""
    path = tmp_path_factory.mktemp("tiny")
    models.tiny_llama().save_pretrained(path / "model")
    models.tiny_tokenizer().save_pretrained(path / "model")
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, models.VOCAB, (count,), generator=generator).tolist())

    rows = [
        {"prompt": words(5), "answer": words(3 + 4 * (i % 2)), "label": i % 2, "question_id": i // 2, "note": "kept é"}
        for i in range(40)
    ]
    (path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def invoke(*words: object) -> str:
    """The output; what hfplug raises on purpose goes through."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if isinstance(done.exception, HfplugError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_fit_and_score(folder: Path, tmp_path: Path) -> None:
    shared = ("--model", folder / "model")
    fitted = invoke("probe", "fit", folder / "data.jsonl", *shared, "-o", tmp_path / "probe", "--seeds", 1, "--set", "k=4",
                    "--set", "C=[0.1, 1.0]", "--json")  # fmt: skip
    done = json.loads(fitted)
    found = done["cross_validation"]
    assert set(found) >= {"sink", "lap_eig", "attn_eig", "log_det", "nll", "perplexity", "prompt_length", "answer_length"}
    assert found["answer_length"]["mean"] == 1.0  # it was made so
    assert found["sink"]["mean"] > 0.9  # scores depend on the length: why that baseline stands beside them
    assert abs(done["control"]["mean"] - 0.5) < 0.3
    out = tmp_path / "judged.jsonl"
    judging = ("probe", "score", folder / "data.jsonl", *shared, "--probe", tmp_path / "probe", "-o")
    told = json.loads(invoke(*judging, out, "--json"))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["label"] for row in rows] == [i % 2 for i in range(40)]
    assert rows[0]["note"] == "kept é"
    assert all(0 <= row["probability"] <= 1 for row in rows)
    assert told["auroc"] > 0.9
    assert told["mean"] == pytest.approx(sum(row["probability"] for row in rows) / 40)
    assert "AUROC" in invoke(*judging, tmp_path / "again.jsonl")
    with pytest.raises(HfplugError, match="exists already"):
        invoke(*judging, out)


def test_fit_without_folds_and_as_text(folder: Path, tmp_path: Path) -> None:
    shared = (folder / "data.jsonl", "--model", folder / "model", "--set", "C=0.1")
    assert "shuffled" not in invoke("probe", "fit", *shared, "-o", tmp_path / "a", "--folds", 0)
    text = invoke("probe", "fit", *shared, "-o", tmp_path / "b", "--folds", 2, "--seeds", 1, "--set", "layers=[0]")
    for name in ("sink", "answer_length", "labels shuffled", "saved to"):
        assert name in text
    assert json.loads((tmp_path / "b" / "probe.json").read_text())["layout"]["layers"] == [0]


def test_a_probe_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    shared = (folder / "data.jsonl", "--model", folder / "model", "--set", "C=0.1")
    invoke("probe", "fit", *shared, "-o", tmp_path / "p", "--folds", 0)
    other = tmp_path / "other"
    models.tiny_qwen3().save_pretrained(other)
    models.tiny_tokenizer().save_pretrained(other)
    with pytest.raises(HfplugError, match="model: fitted on 'model', given 'other'"):
        invoke("probe", "score", folder / "data.jsonl", "--model", other, "--probe", tmp_path / "p", "-o", tmp_path / "x")


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    data = folder / "data.jsonl"
    with pytest.raises(HfplugError, match=r"--set.*'kk'.*options: k, C"):
        invoke("probe", "fit", data, "--model", "m", "-o", tmp_path / "p", "--set", "kk=3")
    with pytest.raises(HfplugError, match="must be key=value"):
        invoke("probe", "fit", data, "--model", "m", "-o", tmp_path / "p", "--set", "k")
    with pytest.raises(HfplugError, match="exists already"):
        invoke("probe", "fit", data, "--model", "m", "-o", folder)
    with pytest.raises(HfplugError, match=r"no probe\.npz"):
        invoke("probe", "score", data, "--model", "m", "--probe", folder, "-o", tmp_path / "x")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:6]))
    with pytest.raises(HfplugError, match="5 folds need as many questions"):
        invoke("probe", "fit", few, "--model", folder / "model", "-o", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_a_wrong_line_is_one_line_by_file_and_number(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b", "label": 1}\n{"prompt": "a", "answer": "b", "lable": 0}\n')
    program = "from hfplug.cli import main; main()"
    command = [sys.executable, "-c", program, "probe", "fit", str(data), "--model", "m", "-o", str(tmp_path / "p")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == f"hfplug: {data}:2: no field 'label' (did you mean 'lable'?)"
    assert "Traceback" not in done.stderr
