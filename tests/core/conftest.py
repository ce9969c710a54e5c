"""Makes ``attention_toys.py`` beside this file importable for the attention tests, without the folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


class _Toys:
    """Finds that one module, when it is asked for: it imports torch, which most tests here do not need."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        file = Path(__file__).with_name("attention_toys.py")
        return importlib.util.spec_from_file_location(name, file) if name == "attention_toys" else None


sys.meta_path.append(_Toys)
