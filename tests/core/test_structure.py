"""The house rules, read off the source: imports go one way, files stay small, nothing builds code from text."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("callbacks", "kernels", "losses", "modeling_patches", "trainers", "tuners")
CORE = (
    "__init__", "_version", "activation", "artefacts", "calls", "changes", "errors", "hookspecs", "ledger", "method",
    "metrics", "namespace", "options", "plugins",
)  # fmt: skip


def sources() -> dict[str, Path]:
    """Module name -> file of everything that is shipped."""
    found = {}
    for top in ("hfplug", *KINDS):
        for path in (ROOT / top).rglob("*.py"):
            if "__pycache__" in path.parts or (top == "hfplug" and set(path.relative_to(ROOT).parts[1:-1]) & set(KINDS)):
                continue
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if top != "hfplug":
                parts.insert(0, "hfplug")
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


SOURCES = sources()


def imports(name: str, *, top_level: bool = False) -> set[str]:
    """The modules of hfplug that a module imports; ``top_level``: only those imported when it is."""
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    nodes: list[ast.AST] = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if top_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            nodes.append(child)
            walk(child)

    walk(tree)
    out: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            names = {f"{node.module}.{a.name}" for a in node.names}
            # `from package import module` needs the module; any other name needs what the package's own file defines
            out |= names if names <= set(SOURCES) else names | {node.module or ""}
    return {m for m in out if m in SOURCES} - {name}


def method_of(name: str) -> str | None:
    """``"tuners.ulora"`` for every module of that method."""
    parts = name.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in KINDS and (ROOT / parts[1] / parts[2]).is_dir() else None


METHODS = sorted({m for m in map(method_of, SOURCES) if m})


def test_the_walk_sees_the_whole_house() -> None:
    assert {"tuners.ulora", "losses.nitp", "callbacks.sink_monitor"} <= set(METHODS)
    assert "hfplug.seams.tuner" in SOURCES
    assert "hfplug.ledger" in imports("hfplug.seams.tuner")
    assert "hfplug.tuners.ulora.layer" in imports("hfplug.tuners.ulora.model")


def test_no_import_circle() -> None:
    graph = {name: imports(name, top_level=True) for name in SOURCES}
    # Importing a.b runs a/__init__.py first, but that is a circle only if the package itself needs the module.
    state: dict[str, int] = {}

    def visit(name: str, path: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, " -> ".join([*path[path.index(name) :], name])
        state[name] = 1
        for target in sorted(graph[name]):
            visit(target, [*path, name])
        state[name] = 2

    for name in graph:
        visit(name, [])


def test_the_core_and_the_seams_know_no_method_and_no_seam_another() -> None:
    for name in SOURCES:
        if method_of(name):
            continue
        assert not [m for m in imports(name) if method_of(m)], f"{name} imports a method"
        if name.startswith("hfplug.seams."):
            assert not [m for m in imports(name) if m.startswith("hfplug.seams.")], f"{name} imports another seam"
    for name in CORE:
        found = imports("hfplug" if name == "__init__" else f"hfplug.{name}")
        assert not [m for m in found if m.startswith(("hfplug.seams", "hfplug.cli", "hfplug.report", "hfplug.testing"))], name


def test_a_method_imports_no_other_method() -> None:
    for name in SOURCES:
        if own := method_of(name):
            assert {method_of(m) for m in imports(name)} - {None, own} == set(), name


def test_manifests_import_nothing_but_hfplug() -> None:
    for method in METHODS:
        tree = ast.parse(SOURCES[f"hfplug.{method}"].read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert set(names) <= {"hfplug", "hfplug.namespace", "__future__"}, method


def test_every_method_has_its_entry_point_its_test_and_its_page() -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read(ROOT / "entry_points.txt")
    listed = {value: name for name, value in parser.items("hfplug")}
    for method in METHODS:
        kind, name = method.split(".")
        assert listed.get(f"hfplug.{method}") == name
        assert (ROOT / "tests" / kind / f"test_{name}.py").is_file()
        assert (ROOT / "docs" / "methods" / f"{name}.md").is_file()
    assert len(listed) == len(METHODS)


def lines_of_code(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in skip and token.type != tokenize.ENCODING:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def test_the_core_stays_small_and_no_file_is_long() -> None:
    core = sum(lines_of_code(ROOT / "hfplug" / f"{name}.py") for name in CORE)
    assert core <= 1500, f"{core} lines of code"
    for name, path in SOURCES.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, name


def test_b21_nothing_builds_code_from_text() -> None:
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"exec", "eval", "compile"}, f"{name}: {called}"
                assert not called.endswith("getsource"), f"{name}: {called}"


def test_a_kernels_folder_at_the_top_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_project_speaks_of_the_project_alone() -> None:
    for path in [*SOURCES.values(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.~])/(root|home|work|tmp)/", text), path


TOY = """
from hfplug import Kind, Method, Paper, hookimpl

@hookimpl
def hfplug_methods():
    return [Method(name="toy", kind=Kind.TUNER, target="hfplug.tuners.toy.tuner:ToyModel",
                   config="hfplug.tuners.toy.tuner:ToyConfig", summary="a toy",
                   paper=Paper(title="none", venue="none", url="none", fidelity="our reading"))]
"""
TOY_TUNER = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfplug.seams.tuner import PluginConfig, PluginTuner


@dataclass
class ToyConfig(PluginConfig):
    method: ClassVar[str] = "toy"
    scale: float = 0.5


class ToyLinear(nn.Module, BaseTunerLayer):
    adapter_layer_names = ("toy_bias",)

    def __init__(self, base_layer, adapter_name, config, key):
        super().__init__()
        self.base_layer = base_layer
        self.toy_bias = nn.ParameterDict()
        self.merged_adapters = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name, config):
        self.toy_bias[adapter_name] = nn.Parameter(torch.full((self.base_layer.out_features,), config.scale))
        self.set_adapter(self.active_adapters)

    def forward(self, x):
        result = self.base_layer(x)
        return result if self.disable_adapters else result + sum(self.toy_bias[n] for n in self.active_adapters)


class ToyModel(PluginTuner):
    method = "toy"
    tuner_layer_cls = ToyLinear
"""
TOY_USE = """
import tempfile, torch, hfplug
from hfplug.testing.models import tiny_llama
from peft import PeftModel, get_peft_model
from hfplug.tuners import ToyConfig
assert hfplug.__file__.startswith({root!r}), hfplug.__file__
model = get_peft_model(tiny_llama(), hfplug.tuners.config(type="toy", scale=0.25, target_modules=["q_proj"]))
ids = torch.arange(3, 9)[None]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(tiny_llama(), folder)
assert torch.equal(model(ids).logits, again(ids).logits)
assert not torch.equal(model(ids).logits, tiny_llama()(ids).logits)
print("TOY WORKS", ToyConfig.__name__)
"""


def test_a_new_tuner_is_one_folder_and_one_line(tmp_path: Path) -> None:
    """The 40th method touches no existing file but entry_points.txt."""
    for name in ("hfplug", *KINDS):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "entry_points.txt", tmp_path)
    folder = tmp_path / "tuners" / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text(TOY)
    (folder / "tuner.py").write_text(TOY_TUNER)
    with (tmp_path / "entry_points.txt").open("a") as file:
        file.write("toy = hfplug.tuners.toy\n")
    # What an install of the copy would write; the first distribution of a name on the path is the one that counts.
    info = tmp_path / "hfplug-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hfplug\nVersion: 0.1.0\n")
    shutil.copy(tmp_path / "entry_points.txt", info)
    code = TOY_USE.format(root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "TOY WORKS ToyConfig" in done.stdout, done.stderr


def test_importing_hfplug_loads_nothing_heavy() -> None:
    code = "import sys, hfplug; print(sorted({'torch', 'transformers', 'peft', 'trl', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", CORE)
def test_core_modules_exist(name: str) -> None:
    assert importlib.util.find_spec("hfplug" if name == "__init__" else f"hfplug.{name}") is not None
