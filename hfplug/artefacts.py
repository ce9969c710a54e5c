"""What a saved file says about the plugin it needs, and the error for when that plugin is absent.

The record is a plain dict under the key ``"hfplug"`` of ``config.json`` or ``adapter_config.json``, repeated in the model
card, so that a reader without hfplug finds it too::

    {"plugin": "ulora", "distribution": "hfplug", "version": "0.1.0", "format": 1}
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from hfplug.errors import ConfigError, MissingPluginError, UnsupportedError
from hfplug.plugins import Entry, catalogue

KEY = "hfplug"
PATCHES = "hfplug_patches"  # in adapter_config.json: the records of the patches on the base model
PATCH_SECTION = "patches"  # in the record of a model's configuration: those of its patches
FORMAT = 1
_PART = r"\w([\w.-]*\w)?"
_HUB_ID = re.compile(rf"{_PART}(/{_PART})?", re.ASCII)
_WANTED = re.compile(rf"{_PART}>=[\w.!+-]+", re.ASCII)


def record(entry: Entry) -> dict[str, Any]:
    """The record of a method, to be stored under ``"hfplug"``."""
    return {
        "plugin": entry.method.name,
        "distribution": entry.source.distribution,
        "version": entry.source.version,
        "format": FORMAT,
    }


def install_line(stored: Mapping[str, Any]) -> str:
    """The ``pip install`` line for what a record names."""
    wanted = f"{stored['distribution']}>={stored['version']}"
    # The record comes out of a downloaded file, and the line is one a user is told to run in a shell.
    return f'pip install "{wanted}"' if _WANTED.fullmatch(wanted) else f"nothing that can be installed by name: {wanted!r}"


def check_record(stored: Mapping[str, Any], what: str) -> None:
    """Make sure the plugin a stored record names is usable here.

    Args:
        stored: the record read from the artefact.
        what: the artefact, for the message.

    Raises:
        MissingPluginError: the plugin is not installed, is disabled, failed to load (the cause is given), or another
            distribution provides the name here; or the record is damaged.
        UnsupportedError: the record was written by a newer format than this hfplug reads.
    """
    keys = ("plugin", "distribution", "version")
    whole = isinstance(stored, Mapping) and all(isinstance(stored.get(k), str) for k in keys)
    if not whole or not isinstance(stored.get("format", 1), int):
        raise MissingPluginError(f"{what} carries a damaged hfplug record: {stored!r}")
    if stored.get("format", 1) > FORMAT:
        raise UnsupportedError(f"{what} uses record format {stored['format']}, this hfplug reads up to {FORMAT}; upgrade hfplug")
    name, found = stored["plugin"], catalogue()
    broken, entry = found.why_not(name), found.entries.get(name)
    state = f"it is installed but not usable: {broken}" if broken else "it is not installed here, or is disabled"
    if entry is not None:
        if canonicalize_name(entry.source.distribution) == canonicalize_name(stored["distribution"]):
            return
        state = f"here {name!r} is provided by {entry.source}, which is another plugin: disable or uninstall it"
    raise MissingPluginError(
        f"{what} was written by the hfplug plugin {name!r} of {stored['distribution']} {stored['version']}; {state}. "
        f"To load it: {install_line(stored)}"
    )


def patch_records(config: Any) -> list[dict[str, Any]]:
    """The records of patches in a model's configuration, in the order in which they were applied.

    Raises:
        ConfigError: what stands there is no list of records.
    """
    kept = getattr(config, KEY, None)
    section = kept.get(PATCH_SECTION, []) if isinstance(kept, Mapping) else []
    if not isinstance(section, list) or not all(isinstance(r, Mapping) for r in section):
        raise ConfigError(f"{type(config).__name__}.{KEY}[{PATCH_SECTION!r}] is damaged: {section!r} is no list of records")
    return [dict(r) for r in section]


def quantizer_record(config: Any) -> dict[str, Any] | None:
    """The record in the ``quantization_config`` of a model's configuration; ``None`` where no plugin quantised the model."""
    section = getattr(config, "quantization_config", None)
    stored = section.get(KEY) if isinstance(section, Mapping) else getattr(section, KEY, None)
    return dict(stored) if isinstance(stored, Mapping) else None


def is_local_path(name: str) -> bool:
    """Whether a model name is a path of some machine rather than a hub id (``org/name`` or ``name``).

    A name that reads like a hub id is a path if there is such a folder: that is what ``from_pretrained`` loads.
    """
    return _HUB_ID.fullmatch(name) is None or Path(name).is_dir()


_BEGIN, _END = "<!-- hfplug: begin -->", "<!-- hfplug: end -->"


def update_card(path: Path, stored: Mapping[str, Any], load_example: str, options: Mapping[str, Any]) -> None:
    """Write the hfplug section into a model card and take local paths out of its metadata; repeating it changes nothing.

    A folder of the machine that trained says nothing to a reader and fails the hub's validation of ``base_model``
    (huggingface/transformers#33922), so an unnamed base model is left out and said.
    """
    from huggingface_hub import ModelCard

    card, notes = ModelCard.load(path), []
    base = card.data.get("base_model")
    if isinstance(base, str) and is_local_path(base):
        del card.data.base_model
        card.data.tags = [tag for tag in card.data.get("tags") or [] if not tag.startswith("base_model:")]
        if len(base) > 2 and set(base) & set("/\\"):  # not "" or ".", which stand everywhere in a text
            card.text = card.text.replace(base, "a local folder")
        where = "loaded from a local folder" if base else "built in memory"
        notes.append(f"The base model was {where}, so it is not named here; name it before publishing.")
    head, _, rest = card.text.partition(_BEGIN)
    section = card_section(stored, load_example, options, notes)
    card.text = f"{head.rstrip()}\n\n{_BEGIN}\n{section}{_END}\n{rest.partition(_END)[2].lstrip()}"
    card.save(path)


def card_section(stored: Mapping[str, Any], load_example: str, options: Mapping[str, Any], notes: Iterable[str] = ()) -> str:
    """The Markdown section a model card gets: method, paper, versions, configuration, how to load."""
    entry = catalogue().entries.get(stored["plugin"])
    lines = ["## hfplug", "", f"Needs the plugin `{stored['plugin']}`: `{install_line(stored)}`", "", *_origin(entry)]
    lines += ["| option | value |", "| --- | --- |", *(f"| {k} | `{v}` |" for k, v in sorted(options.items())), ""]
    lines += [*(f"{note}\n" for note in notes), "```python", load_example, "```", ""]
    return "\n".join(lines)


def _origin(entry: Entry | None) -> list[str]:
    if entry is None:
        return []
    paper = entry.method.paper
    source = f"Paper: [{paper.title}]({paper.url}), {paper.venue} (fidelity: {paper.fidelity})."
    return [f"Method: {entry.method.summary}.", source, ""]


def plain_card(path: Path, stored: Mapping[str, Any], how: str, options: Mapping[str, Any], base: str | None) -> None:
    """Write the card of an adapter that a plugin made and that loads without it (an exported or merged plain LoRA).

    Args:
        path: the README to write.
        stored: the record of the method.
        how: one sentence without a full stop: where the adapter comes from.
        options: what to list in the table.
        base: name of the base model; left out, and said, where it is a path of this machine.
    """
    from huggingface_hub import ModelCard, ModelCardData

    entry = catalogue().entries.get(stored["plugin"])
    named = base if base and not is_local_path(base) else None
    title = f"# A LoRA adapter of {named}" if named else "# A LoRA adapter"
    lines = [title, "", f"{how} {stored['version']}. A plain LoRA: PEFT alone loads it.", "", *_origin(entry)]
    if named is None:
        lines += ["The base model was a local folder or built in memory, so it is not named here; name it before publishing.", ""]
    lines += ["| option | value |", "| --- | --- |", *(f"| {k} | `{v}` |" for k, v in sorted(options.items())), ""]
    load = ["from peft import PeftModel", "", 'model = PeftModel.from_pretrained(base_model, "THIS_FOLDER_OR_REPOSITORY")']
    lines += ["```python", *load, "```", ""]
    data = ModelCardData(library_name="peft", tags=["lora", "hfplug", stored["plugin"]], base_model=named)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)).save(path)


def check_new_folder(folder: Path, argument: str) -> None:
    """Refuse to write into a folder that holds something.

    Raises:
        ConfigError: it exists and is not an empty folder.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{argument}={str(folder)!r} exists and is not an empty folder; choose another, or remove it")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write in that becomes ``target`` when the block ends, and leaves nothing when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield part
        part.chmod(0o755)  # mkdtemp makes it private
        if target.exists():
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone already when it was renamed
