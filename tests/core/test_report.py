"""The report of a run: pictures that show something, a page that hides nothing and trusts no text of the run."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hfplug.errors import HfplugError
from hfplug.report import ReportError, update_facts, write_report
from hfplug.report.data import read_run

pytest.importorskip("matplotlib")

LAYERS, RANK, STEPS = 6, 4, 20
FIGURES = ("loss", "utilisation", "sink")


def history() -> list[dict]:
    """Log entries as a Trainer writes them, an evaluation before the first step included."""
    rng = np.random.default_rng(0)
    entries: list[dict] = [{"step": 0, "epoch": 0.0, "eval_loss": 3.1, "eval_runtime": 2.0}]
    for step in range(5, STEPS + 1, 5):
        entry = {"step": step, "loss": 4.0 - step / 20, "nitp/loss": 1.0 - step / 40, "learning_rate": 1e-3}
        for layer in range(LAYERS):
            entry[f"sink/mass/layer_{layer:02d}"] = 0.1 * layer + 0.02 * float(rng.random())
            entry[f"sink/value_norm/layer_{layer:02d}"] = 2.0 ** (1 - layer)
        entries.append(entry)
    entries.append({"step": STEPS, "eval_loss": 2.6})
    entries.append({"step": STEPS, "train_runtime": 61.0, "train_loss": 3.3})
    return entries


def adapter(values: np.ndarray, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Tensors under the names a saved U-LoRA adapter has; values (layers, modules, rank)."""
    tensors = {}
    for layer, modules in enumerate(values):
        for module, row in zip(("q_proj", "v_proj"), modules, strict=True):
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{path}.ulora_ema"] = row.astype("float32")
            tensors[f"{path}.ulora_steps"] = np.array(steps, dtype="int64")
            tensors[f"{path}.ulora_A.weight"] = np.zeros((RANK, 8), dtype="float32")
    return tensors


def facts() -> dict:
    return {
        "model": "SmolLM2-135M-Instruct",
        "data": "the language reference",
        "plugins": [
            {
                "kind": "tuner",
                "name": "ulora",
                "distribution": "hfplug",
                "version": "0.1",
                "options": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            }
        ],
        "versions": {"torch": "2.13.0"},
        "parameters": {"trainable": 469_440, "total": 134_984_960},
        "seconds": {"training": 61.0, "everything": 90.0},
        "evaluation": {"before": {"loss": 3.1}, "after": {"loss": 2.6}, "reloaded": {"loss": 2.6}},
        "samples": [{"question": "What is a slice?", "before": "Bread.", "after": "A range of items.", "reloaded": "Other."}],
    }


VALUES = 1 + 0.2 * np.random.default_rng(1).standard_normal((LAYERS, 2, RANK))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "runs" / "demo"
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history(), "global_step": STEPS}))
    (folder / "hfplug_run.json").write_text(json.dumps(facts()))
    save_file(adapter(VALUES), folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The page of one complete run, made once: drawing takes about a second."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    fill(folder)
    return write_report(folder)


class Page(HTMLParser):
    """The page as a browser sees it: tags, attributes, text; refuses tags that do not match."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def pixels(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.float64)


def test_report_writes_page_and_pictures(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report" / "report.html"
    expected = {"report.html", *(f"{name}{dark}.png" for name in FIGURES for dark in ("", "-dark"))}
    assert {file.name for file in path.parent.iterdir()} == expected


def test_pictures_are_large_not_blank_and_differ_between_light_and_dark(written):
    folder = written.parent
    for name in FIGURES:
        light, dark = pixels(folder / f"{name}.png"), pixels(folder / f"{name}-dark.png")
        assert light.shape == dark.shape
        assert light.shape[1] >= 1000
        for image in (light, dark):
            assert image.std() > 8
            assert len(np.unique(image[::5, ::5].sum(axis=2))) > 50
        assert light[0, 0].mean() > 240
        assert dark[0, 0].mean() < 60
        assert light.mean() > dark.mean()


def test_page_shows_every_panel_fact_and_answer(written):
    page = page_of(written)
    for expected in (
        "SmolLM2-135M-Instruct with ulora", "Loss", "Use of the low-rank directions", "Attention sink", "Sample answers",
        "3.100", "2.600", "22.2", "13.5", "469,440", "0.35 %", "135 million", "1 min 1 s", "1 min 30 s", "20 steps",
        "What is a slice?", "Bread.", "A range of items.", "Other.", "torch 2.13.0", "from hfplug 0.1",
        "r 4, target_modules q_proj + v_proj",
        "the language reference",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert len(page.all("img")) == len(FIGURES)
    assert all(len(image["alt"]) > 40 for image in page.all("img"))


def test_one_answer_box_where_the_reloaded_answer_is_the_same(run_dir):
    update_facts(run_dir, {"samples": [{"question": "Q", "before": "B", "after": "Same.", "reloaded": "Same."}]})
    (run_dir / "trainer_state.json").write_text('{"log_history": []}')
    page = page_of(write_report(run_dir))
    assert page.words.count("Same.") == 1
    assert "again from the saved adapter in a new process" in page.text


def test_page_needs_nothing_from_outside(written):
    path = written
    markup = path.read_text(encoding="utf-8")
    page = Page(markup)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    sources = [a["src"] for a in page.all("img")] + [a["srcset"] for a in page.all("source")]
    assert len(sources) == 2 * len(FIGURES)
    for source in sources:
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) in [file.read_bytes() for file in path.parent.glob("*.png")]
    assert not re.search(r"https?://|@import|url\(", markup)
    assert {a["media"] for a in page.all("source")} == {"(prefers-color-scheme: dark)"}
    assert str(written.parent.parent.parent) not in markup


def test_hostile_text_is_shown_not_run(run_dir):
    attack = "</title></p><script>alert(1)</script><img src=x onerror='a()'>&\"$title ${kicker}"
    hostile = json.loads(json.dumps(facts()).replace("Bread.", "x"))
    hostile |= {"model": attack, "data": attack, "date": attack, "notes": [attack]}
    hostile["plugins"][0] |= {"kind": attack, "name": attack, "distribution": attack, "options": {attack: attack}}
    hostile["versions"] = {attack: attack}
    (run_dir / "trainer_state.json").write_text('{"log_history": []}')
    hostile["samples"] = [dict.fromkeys(("question", "before", "after", "reloaded"), attack + " 1")]
    (run_dir / "hfplug_run.json").write_text(json.dumps(hostile))
    page = page_of(write_report(run_dir))
    assert page.all("script") == []
    assert len(page.all("img")) == 1  # utilisation; the one of the attack is text
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert page.text.count(attack) >= 10


def test_hostile_module_names_stay_text(run_dir):
    module = '<b>"onload="a()"$x ${'
    values = {f"m.layers.0.attn.{module}.ulora_ema": np.full(RANK, 1.5, "float32")}
    values[f"m.layers.0.attn.{module}.ulora_steps"] = np.array(1, dtype="int64")
    save_file(values, run_dir / "adapter_model.safetensors")
    (run_dir / "trainer_state.json").write_text('{"log_history": []}')
    page = page_of(write_report(run_dir))
    (image,) = page.all("img")
    assert module in image["alt"]
    assert set(image) == {"src", "alt"}
    assert len(page.all("b")) == 1  # of the plugin's chip


def test_plain_trainer_run_says_what_is_absent(tmp_path):
    run = tmp_path / "plain"
    run.mkdir()
    entries = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.5}, {"step": 20, "train_runtime": 5.0}]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    path = write_report(run)
    assert sorted(file.name for file in path.parent.iterdir()) == ["loss-dark.png", "loss.png", "report.html"]
    page = page_of(path)
    for sentence in (
        "the run did not evaluate", "The run saved no adapter", "did not use the sink_monitor callback",
        "recorded no sample answers",
    ):  # fmt: skip
        assert sentence in page.text
    assert "NITP" not in page.text


def test_run_without_any_loss_still_has_a_page(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    page = page_of(write_report(tmp_path))
    assert page.all("img") == []
    assert "neither a training nor an evaluation loss" in page.text


def test_state_and_adapter_of_the_last_checkpoint_are_found(run_dir):
    for number, shift in ((200, 0.0), (1000, 0.5), (90, 0.0)):
        checkpoint = run_dir / f"checkpoint-{number}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": number, "loss": 1.0}]}))
        save_file(adapter(VALUES + shift), checkpoint / "adapter_model.safetensors")
    assert read_run(run_dir).curve("loss").steps[-1] == STEPS  # the run's own state comes first
    (run_dir / "trainer_state.json").unlink()
    (run_dir / "adapter_model.safetensors").unlink()
    run = read_run(run_dir)
    assert run.curve("loss").steps == (1000,)
    np.testing.assert_allclose(run.utilisation.values, VALUES + 0.5, rtol=1e-6)


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(ReportError, match="is not a folder") as caught:
        write_report(tmp_path / "nowhere")
    assert isinstance(caught.value, HfplugError)
    with pytest.raises(ReportError, match=r"no trainer_state\.json in .* no checkpoint-\* folder"):
        write_report(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ReportError, match=r"nor checkpoint-3/trainer_state\.json"):
        write_report(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(ReportError, match=r"trainer_state\.json is not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    with pytest.raises(ReportError, match="log_history"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_out_is_a_folder_of_choice_and_never_a_file(run_dir, tmp_path):
    assert write_report(run_dir, tmp_path / "a" / "b") == tmp_path / "a" / "b" / "report.html"
    assert not (run_dir / "report").exists()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ReportError, match="is a file"):
        write_report(run_dir, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_missing_matplotlib_names_the_extra(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HfplugError, match=r'pip install "hfplug\[plots\]"'):
        write_report(run_dir)


def test_utilisation_is_read_as_stored(run_dir):
    found = read_run(run_dir).utilisation
    assert found.layers == tuple(range(LAYERS))
    assert found.modules == ("q_proj", "v_proj")
    assert found.steps == STEPS
    np.testing.assert_allclose(found.values, VALUES, rtol=1e-6)


def test_uneven_ranks_and_missing_modules_leave_gaps(run_dir):
    tensors = adapter(VALUES)
    del tensors["base_model.model.model.layers.2.self_attn.v_proj.ulora_ema"]
    tensors["base_model.model.model.layers.1.self_attn.q_proj.ulora_ema"] = np.ones(2, "float32")
    save_file(tensors, run_dir / "adapter_model.safetensors")
    values = read_run(run_dir).utilisation.values
    assert np.isnan(values[2, 1]).all()
    assert np.isnan(values[1, 0]).tolist() == [False, False, True, True]
    assert np.isnan(values).sum() == RANK + 2
    write_report(run_dir)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"base_model.model.layers.0.q_proj.lora_A.weight": np.zeros((2, 2), "float32")}, "did not use the ulora tuner"),
        (adapter(np.ones((2, 2, RANK)), steps=0), "no optimiser step was counted"),
    ],
)
def test_adapters_without_statistics_say_why(run_dir, tensors, sentence):
    save_file(tensors, run_dir / "adapter_model.safetensors")
    path = write_report(run_dir)
    assert sentence in page_of(path).text
    assert not (path.parent / "utilisation.png").exists()


def test_a_diverged_run_is_said_to_have_diverged(run_dir):
    entries = [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}]
    (run_dir / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    save_file(adapter(VALUES * np.nan), run_dir / "adapter_model.safetensors")
    text = page_of(write_report(run_dir)).text
    assert "1 logged values are not finite" in text
    assert "The utilisation statistics are not finite: training diverged." in text
    (run_dir / "trainer_state.json").write_text(json.dumps({"log_history": entries[2:]}))
    assert "None of the 1 logged losses is finite" in page_of(write_report(run_dir)).text


def test_broken_adapter_file_says_why(run_dir):
    (run_dir / "adapter_model.safetensors").write_bytes(b"not safetensors")
    assert "could not be read" in page_of(write_report(run_dir)).text


def test_saved_ulora_adapter_is_understood(tmp_path):
    """The names and meaning of the statistics, agreed with the tuner: read what it really saves."""
    torch = pytest.importorskip("torch")
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import hfplug

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1
    )
    model = get_peft_model(
        LlamaForCausalLM(config), hfplug.tuners.config(type="ulora", r=RANK, target_modules=["q_proj", "v_proj"])
    )
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "fold_ema"):
            mean = torch.linspace(0.5, 1.5, RANK) + 0.1 * len(expected)
            module.fold_ema("default", mean)
            expected[name.split(".")[-3], name.split(".")[-1]] = mean.numpy()
    model.save_pretrained(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    found = read_run(tmp_path).utilisation
    assert (found.layers, found.modules, found.steps) == ((0, 1, 2), ("q_proj", "v_proj"), 1)
    for layer in found.layers:
        for column, module in enumerate(found.modules):
            # After one step the bias-corrected mean is that step's mean exactly.
            np.testing.assert_allclose(found.values[layer, column], expected[str(layer), module], rtol=1e-6)


def test_layer_series_has_gaps_where_nothing_was_logged(tmp_path):
    entries = [{"step": 2, "x/layer_00": 0.1, "x/layer_10": 0.3}, {"step": 1, "x/layer_10": 0.2}]
    entries += [{"step": 3, "x/layer_00": float("nan"), "x/layer_1b": 9.0}, {"x/layer_00": 5.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    series = read_run(tmp_path).by_layer("x/layer_")
    assert (series.layers, series.steps) == ((0, 10), (1, 2))
    np.testing.assert_equal(series.values, [[np.nan, 0.1], [0.2, 0.3]])
    assert read_run(tmp_path).by_layer("y/layer_") is None


@pytest.mark.parametrize("drop", ["sink/mass", "sink/value_norm"])
def test_half_of_the_sink_statistics_is_enough(run_dir, drop):
    entries = [{k: v for k, v in entry.items() if not k.startswith(drop)} for entry in history()]
    (run_dir / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    path = write_report(run_dir)
    assert (path.parent / "sink.png").exists()
    assert "not logged" in page_of(path).text


def test_single_points_and_zero_ratios_are_drawn(run_dir):
    entry = {"step": 1, "loss": 1.0, "nitp/loss": 0.5, "eval_loss": 1.0}
    entry |= {"sink/mass/layer_00": 0.0, "sink/value_norm/layer_00": 0.0}
    (run_dir / "trainer_state.json").write_text(json.dumps({"log_history": [entry]}))
    folder = write_report(run_dir).parent
    assert all((folder / f"{name}.png").exists() for name in FIGURES)


def test_facts_are_merged_key_by_key(tmp_path):
    update_facts(tmp_path, {"seconds": {"training": 1.0}, "samples": [1]})
    path = update_facts(tmp_path, {"seconds": {"everything": 2.0}, "samples": [2]})
    assert json.loads(path.read_text()) == {"seconds": {"training": 1.0, "everything": 2.0}, "samples": [2]}
    assert [file.name for file in tmp_path.iterdir()] == ["hfplug_run.json"]


def test_reading_a_run_needs_neither_torch_nor_matplotlib(run_dir):
    code = (
        "import sys; from pathlib import Path; from hfplug.report.data import read_run; "
        f"read_run(Path({str(run_dir)!r})); print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_drawing_touches_no_global_state_of_matplotlib(run_dir):
    # pyplot first: comparing rcParams reads rcParams["backend"], which itself loads pyplot and chooses a backend.
    code = (
        "import sys, matplotlib; from hfplug.report import write_report; before = matplotlib.rcParams.copy(); "
        f"write_report({str(run_dir)!r}); "
        "print('matplotlib.pyplot' in sys.modules, all(before[k] == matplotlib.rcParams[k] for k in before if k != 'backend'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def split_colours(path: Path, left: float, right: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean colour of the lower and of the upper third of the picture, between two columns (shares of the width)."""
    image = pixels(path)
    height, width, _ = image.shape
    columns = image[:, int(left * width) : int(right * width)]
    lower, upper = columns[int(0.62 * height) : int(0.78 * height)], columns[int(0.2 * height) : int(0.36 * height)]
    return lower.mean(axis=(0, 1)), upper.mean(axis=(0, 1))


def test_utilisation_colours_stand_where_the_values_are(run_dir):
    """Low layers of q_proj used less (blue, below), high ones more (orange, above); v_proj the other way round."""
    values = np.full((LAYERS, 2, RANK), 0.6)
    values[LAYERS // 2 :, 0] = values[: LAYERS // 2, 1] = 1.4
    save_file(adapter(values), run_dir / "adapter_model.safetensors")
    folder = write_report(run_dir).parent
    for name in ("utilisation.png", "utilisation-dark.png"):
        for columns, flipped in (((0.1, 0.4), False), ((0.55, 0.85), True)):
            low, high = split_colours(folder / name, *columns)[:: -1 if flipped else 1]
            assert low[2] > low[0] + 60, "less than plain LoRA is blue"
            assert high[0] > high[2] + 60, "more than plain LoRA is orange"


def test_sink_colours_stand_where_the_values_are(run_dir):
    entries = [{"step": 1} | {f"sink/mass/layer_{layer:02d}": 0.05 + 0.9 * (layer >= 3) for layer in range(LAYERS)}]
    (run_dir / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    folder = write_report(run_dir).parent
    lower, upper = split_colours(folder / "sink.png", 0.15, 0.5)
    assert upper.mean() > lower.mean() + 60, "cividis: a large share is bright"
