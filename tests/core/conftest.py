"""Makes ``*_toys.py`` beside this file importable for the tests here, without the folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


class _Toys:
    """Finds those modules when they are asked for: they import torch, which most tests here do not need."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        file = Path(__file__).with_name(f"{name}.py")
        return importlib.util.spec_from_file_location(name, file) if name in ("attention_toys", "patch_toys") else None


sys.meta_path.append(_Toys)
