"""Discovery: every way a plugin can be broken costs that plugin alone, and is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MANIFEST = """
from hfplug import Kind, Method, Paper, hookimpl
PAPER = Paper(title="t", venue="v", url="u", fidelity="our reading")

def method(name, **more):
    options = dict(kind=Kind.CALLBACK, target="{module}_impl:Callback", config="{module}_impl:Config", summary="s", paper=PAPER)
    return Method(name=name, **{{**options, **more}})

@hookimpl
def hfplug_methods():
    return [method("{name}")]
"""


class Site:
    """A folder on the path with distributions in it, as pip would leave them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, distribution: str, code: str, *, name: str | None = None, version: str = "1.2") -> None:
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(code.format(module=module, name=name or module))
        info = self.path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[hfplug]\n{name or module} = {module}\n")

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        code = "from hfplug.cli import main; main()"
        path = os.pathsep.join([str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path, **env},
        )  # fmt: skip

    def listing(self, **env: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The methods by name, and plugin -> cause of every problem."""
        done = self.run("list", "--json", **env)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        return {m["name"]: m for m in shown["methods"]}, {p["plugin"]: p["cause"] for p in shown["problems"]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


BROKEN = {
    "raises-at-import": ('raise ImportError("no libfoo")', ["ImportError: no libfoo"]),
    "exits-at-import": ("import sys; sys.exit(3)", ["SystemExit: 3"]),
    "syntax": ("def (", ["SyntaxError"]),
    "raises-in-hook": (
        "from hfplug import hookimpl\n@hookimpl\ndef hfplug_methods():\n    raise RuntimeError('two\\nlines')",
        ["RuntimeError: two"],
    ),
    "misspelt": (
        "from hfplug import hookimpl\n@hookimpl\ndef hfplug_method():\n    return []",
        ["'hfplug_method'", "did you mean 'hfplug_methods'"],
    ),
    "no-hook": ("x = 1", ["implements no hook"]),
    "wrong-type": ("from hfplug import hookimpl\n@hookimpl\ndef hfplug_methods():\n    return ['ulora']", ["str", "Method"]),
    "not-a-list": ("from hfplug import hookimpl\n@hookimpl\ndef hfplug_methods():\n    return 3", ["int"]),
    "bad-method": (MANIFEST.replace('method("{name}")', 'method("Bad Name")'), ["'Bad Name'", "snake_case"]),
    "bad-kind": (MANIFEST.replace('method("{name}")', 'method("x", kind="callbak")'), ["'callbak'", "did you mean 'callback'"]),
}


def test_b28_one_broken_plugin_never_stops_the_others(site: Site) -> None:
    site.add("good-plugin", MANIFEST, name="good")
    for distribution, (code, _) in BROKEN.items():
        site.add(distribution, code)
    methods, problems = site.listing()
    assert {"good", "ulora", "nitp", "sink_monitor"} <= set(methods)
    assert methods["good"]["distribution"] == "good-plugin"
    assert methods["good"]["version"] == "1.2"
    assert set(problems) == {d.replace("-", "_") for d in BROKEN}
    for distribution, (_, words) in BROKEN.items():
        cause = problems[distribution.replace("-", "_")]
        assert "\n" not in cause
        for word in words:
            assert word in cause, (distribution, cause)
    shown = site.run("list").stdout
    assert "no libfoo" in shown


@pytest.mark.parametrize("distribution", ["raises-at-import", "raises-in-hook", "misspelt"])
def test_b28_strict_raises(site: Site, distribution: str) -> None:
    site.add(distribution, BROKEN[distribution][0])
    done = site.run("list", HFPLUG_STRICT="1")
    assert done.returncode == 2
    assert distribution in done.stderr
    assert "Traceback" not in done.stderr
    assert site.run("list", HFPLUG_STRICT="0").returncode == 0


def test_a_plugin_that_imports_torch_is_usable_and_said_to_be_slow(site: Site) -> None:
    site.add("heavy", "import torch\n" + MANIFEST)
    methods, problems = site.listing()
    assert "heavy" in methods
    assert "slow" in problems["heavy"]
    assert "torch" in problems["heavy"]


def test_b02_the_second_of_two_plugins_with_one_name_is_refused_naming_both(site: Site) -> None:
    site.add("b-second", MANIFEST, name="toylora", version="2.0")
    site.add("a-first", MANIFEST, name="toylora", version="1.0")
    methods, problems = site.listing()
    assert methods["toylora"]["distribution"] == "a-first"
    assert "a-first 1.0" in problems["toylora"]
    assert "b-second 2.0" in problems["toylora"]


def test_b02_a_stranger_cannot_take_a_name_of_hfplug(site: Site) -> None:
    site.add("aaa-taker", MANIFEST, name="ulora")
    methods, problems = site.listing()
    assert methods["ulora"]["distribution"] == "hfplug"
    assert "aaa-taker 1.2" in problems["ulora"]


def test_an_unmet_requirement_is_said_and_refused_at_use(site: Site) -> None:
    site.add("needy", MANIFEST.replace('method("{name}")', 'method("{name}", requires=("torch>=99", "nowhere>=1"))'))
    methods, _ = site.listing()
    assert methods["needy"]["unmet"].startswith("needs torch>=99, found ")
    done = subprocess.run(
        [sys.executable, "-c", "import hfplug; hfplug.load('needy')"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(site.path)},
    )  # fmt: skip
    assert "needs torch>=99" in done.stderr


def test_selection_by_environment(site: Site) -> None:
    site.add("good-plugin", MANIFEST, name="good")
    site.add("raises-at-import", BROKEN["raises-at-import"][0])
    assert set(site.listing(HFPLUG_PLUGINS="good,ulora")[0]) == {"good", "ulora"}
    assert site.listing(HFPLUG_PLUGINS="good")[1] == {}
    assert site.listing(HFPLUG_PLUGINS="")[0] == {}
    methods, problems = site.listing(HFPLUG_DISABLE="nitp, raises_at_import")
    assert "nitp" not in methods
    assert "good" in methods
    assert problems == {}  # blocked means: not even imported


@pytest.mark.parametrize("variable", ["HFPLUG_PLUGINS", "HFPLUG_DISABLE"])
def test_an_unknown_name_in_the_environment_is_an_error(site: Site, variable: str) -> None:
    done = site.run("list", **{variable: "ulra"})
    assert done.returncode == 2
    assert variable in done.stderr
    assert "did you mean 'ulora'" in done.stderr


def test_the_order_of_discovery_does_not_depend_on_the_path(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Site(tmp_path_factory.mktemp("other"))
    site.add("b-second", MANIFEST, name="toylora")
    other.add("a-first", MANIFEST, name="toylora")
    for first, second in ((site, other), (other, site)):
        path = os.pathsep.join([str(first.path), str(second.path)])
        code = "import hfplug; print(hfplug.catalogue().get('toylora').source.distribution)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert done.stdout.strip() == "a-first"


ORDERS = {
    "hfplug first": "import hfplug, peft, transformers.trainer",
    "hfplug last": "import peft, transformers.trainer, hfplug",
    "in between": "import peft, hfplug, transformers.trainer",
    "the seam itself": "import hfplug.seams.tuner, transformers.trainer",
}
REGISTRIES = """
import peft.mapping, transformers.trainer
from hfplug import activation
def names():
    return ("ULORA" in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING,
            [c.__name__ for c in transformers.trainer.DEFAULT_CALLBACKS],
            "wrapped" if hasattr(peft.PeftModel.create_or_update_model_card, "__wrapped__") else "stock")
print(names())
activation.deactivate()
print(names())
"""


@pytest.mark.parametrize("order", ORDERS)
def test_names_are_valid_in_every_import_order_and_can_be_taken_back(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", ORDERS[order] + REGISTRIES], capture_output=True, text=True, check=True)
    on, off = done.stdout.strip().splitlines()
    assert on == "(True, ['DefaultFlowCallback', 'MetricsRelay'], 'wrapped')"
    assert off == "(False, ['DefaultFlowCallback'], 'stock')"


FIRST_IMPORTS = {
    "the namespace": "from hfplug.tuners import ULoraConfig",
    "a configuration": "from hfplug.tuners.ulora.config import ULoraConfig",
    "a tuner": "from hfplug.tuners.ulora.model import ULoraModel; from hfplug.tuners.ulora.config import ULoraConfig",
    "what tuners share": "import hfplug.tuners.linear; from hfplug.tuners import ULoraConfig",
}


@pytest.mark.parametrize("first", sorted(FIRST_IMPORTS))
def test_a_tuner_may_be_what_imports_peft(first: str) -> None:
    """The seam would load methods of which one is half imported: it dropped them all."""
    program = f"""
{FIRST_IMPORTS[first]}
ULoraConfig()
import hfplug, peft
print(hfplug.catalogue().problems, {{"ULORA", "BAYES_LORA", "MOLORA"}} - set(peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] set()"


@pytest.mark.parametrize("module", ["hfplug.callbacks.sink_monitor.callback", "hfplug.losses.nitp.loss"])
def test_a_seam_that_waited_is_activated_once(module: str) -> None:
    """A seam that waited for a plugin imports its own trigger when its turn comes: the trigger must not activate it again."""
    program = f"""
import {module}
from hfplug import activation
activation.finish()
import transformers.trainer
print([c.__name__ for c in transformers.trainer.DEFAULT_CALLBACKS])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['DefaultFlowCallback', 'MetricsRelay']"


def test_b22_a_seam_that_fails_does_not_break_the_import_of_peft() -> None:
    code = """
import torch.optim.optimizer as o
del o.register_optimizer_step_post_hook
import hfplug, peft
print(sorted(k for k in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING if k == "ULORA"), hfplug.activation.active())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().startswith("[] ("), done.stderr  # nothing of it stays half registered
    assert "hfplug.seams.tuner" not in done.stdout
    assert "hfplug.seams.tuner is inactive in this process" in done.stderr
    strict = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "HFPLUG_STRICT": "1"}
    )
    assert strict.returncode != 0
