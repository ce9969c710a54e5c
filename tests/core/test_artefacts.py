"""The record in saved files: what it says when the plugin it needs is not the one that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfplug import Kind, Method, MissingPluginError, Paper, UnsupportedError, artefacts, plugins
from hfplug.plugins import Catalogue, Entry, Problem, Source

PAPER = Paper(title="A title", venue="V 2026", url="https://example.org", fidelity="our reading")
TOY = Method(name="toy", kind=Kind.TUNER, target="a:Toy", config="a:ToyConfig", summary="does a thing", paper=PAPER)
SOURCE = Source("toy", "a", "Hfplug_Toy", "1.4")
STORED = {"plugin": "toy", "distribution": "hfplug-toy", "version": "1.2", "format": 1}


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    found = Catalogue({"toy": Entry(TOY, SOURCE)})
    monkeypatch.setattr(plugins, "catalogue", lambda: found)
    monkeypatch.setattr(artefacts, "catalogue", lambda: found)
    return found


def test_a_record_is_accepted_where_its_plugin_is(catalogue: Catalogue) -> None:
    written = artefacts.record(catalogue.get("toy"))
    assert written == {"plugin": "toy", "distribution": "Hfplug_Toy", "version": "1.4", "format": 1}
    artefacts.check_record(written, "x")
    artefacts.check_record(STORED, "x")  # the same distribution in its normal spelling, an older version


def test_b03_a_missing_plugin_is_named_with_its_distribution_version_and_install_line(catalogue: Catalogue) -> None:
    catalogue.entries.clear()
    with pytest.raises(MissingPluginError) as raised:
        artefacts.check_record(STORED, "adapter_config.json")
    assert str(raised.value) == (
        "adapter_config.json was written by the hfplug plugin 'toy' of hfplug-toy 1.2; it is not installed here, or is "
        'disabled. To load it: pip install "hfplug-toy>=1.2"'
    )


@pytest.mark.parametrize("problem", [Problem(SOURCE, "ImportError: no libfoo"), Problem(SOURCE, "ImportError: no libfoo", "toy")])
def test_b03_a_plugin_that_is_installed_but_broken_is_told_apart(catalogue: Catalogue, problem: Problem) -> None:
    catalogue.entries.clear()
    catalogue.problems.append(problem)
    with pytest.raises(MissingPluginError, match="installed but not usable: ImportError: no libfoo"):
        artefacts.check_record(STORED, "x")


def test_a_plugin_that_is_only_slow_is_not_called_broken(catalogue: Catalogue) -> None:
    catalogue.entries.clear()
    catalogue.problems.append(Problem(SOURCE, "slow: its manifest imports torch", usable=True))
    with pytest.raises(MissingPluginError, match="not installed here, or is disabled"):
        artefacts.check_record(STORED, "x")
    with pytest.raises(ValueError, match="unknown method 'toy'; known") as raised:
        catalogue.get("toy")
    assert "slow" not in str(raised.value)


def test_b02_the_same_name_from_another_distribution_is_another_plugin(catalogue: Catalogue) -> None:
    with pytest.raises(MissingPluginError, match=r"of other 1.2; here 'toy' is provided by Hfplug_Toy 1.4") as raised:
        artefacts.check_record({**STORED, "distribution": "other"}, "x")
    assert 'pip install "other>=1.2"' in str(raised.value)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"plugin": "toy", "distribution": "d"},
        {**STORED, "plugin": ["toy"]},
        {**STORED, "version": 1},
        {**STORED, "format": "new"},
    ],
)
def test_a_damaged_record_is_refused(catalogue: Catalogue, stored: Any) -> None:
    with pytest.raises(MissingPluginError, match="damaged hfplug record"):
        artefacts.check_record(stored, "x")


def test_a_newer_record_says_to_upgrade(catalogue: Catalogue) -> None:
    with pytest.raises(UnsupportedError, match="record format 2, this hfplug reads up to 1; upgrade hfplug"):
        artefacts.check_record({**STORED, "format": 2}, "x")
    artefacts.check_record({k: v for k, v in STORED.items() if k != "format"}, "x")


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ('x"; rm -rf ~; "', "1"),
        ("x", '1"; true; "'),
        ("x @ https://evil.example/x.whl", "1"),
        ("--index-url=x", "1"),
        ("x\ny", "1"),
    ],
)
def test_what_a_downloaded_file_says_never_becomes_more_than_a_name_in_an_install_line(distribution: str, version: str) -> None:
    line = artefacts.install_line({"distribution": distribution, "version": version})
    assert "pip install" not in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["gpt2", "org/name", "HuggingFaceTB/SmolLM2-135M", "a/b.c_d-e", "0x/1"])
def test_hub_names_are_no_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not artefacts.is_local_path(name)


PATHS = ["", ".", "..", "./x", "../x", "~/x", "/x", "/data/models/x", "a/b/c", "org/name/", "a/..", "-x"]
PATHS += [r"C:\x", "C:/x", r"\\host\x"]


@pytest.mark.parametrize("name", PATHS)
def test_b53_paths_are_told_from_hub_names(name: str) -> None:
    assert artefacts.is_local_path(name)


def test_b53_a_folder_that_reads_like_a_hub_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not artefacts.is_local_path("runs/demo")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert artefacts.is_local_path("runs/demo")


CARD = """---
base_model: {base}
library_name: peft
tags:
- lora
- base_model:adapter:{base}
---

# Model

Fine-tuned from {base} on something.
"""


@pytest.mark.parametrize("local", [True, False])
def test_b53_the_card_names_method_paper_version_and_options_and_no_local_path(
    catalogue: Catalogue, tmp_path: Path, local: bool
) -> None:
    from huggingface_hub import ModelCard

    base = str(tmp_path / "base") if local else "org/base"
    card = tmp_path / "README.md"
    card.write_text(CARD.format(base=base))
    artefacts.update_card(card, STORED, "import hfplug", {"r": 8, "alpha": None})
    text = card.read_text()
    for words in ('pip install "hfplug-toy>=1.2"', "A title", "our reading", "does a thing", "| r | `8` |", "import hfplug"):
        assert words in text
    data = ModelCard.load(card).data
    if local:
        assert str(tmp_path) not in text
        assert data.base_model is None
        assert data.tags == ["lora"]
        assert "loaded from a local folder, so it is not named here" in text
    else:
        assert data.base_model == base
        assert data.tags == ["lora", "base_model:adapter:org/base"]
        assert f"Fine-tuned from {base} on something." in text
    artefacts.update_card(card, STORED, "import hfplug", {"r": 8, "alpha": None})
    assert card.read_text().count("## hfplug") == 1
    if not local:
        assert card.read_text() == text, "writing it again changes nothing"
