"""Loss tests train a few hundred tiny models."""

from collection_kit import _collect_only_what_the_tests_make  # noqa: F401
