"""Models by name: the MONeT paper's five and their relatives, other libraries' models, and people's own."""

from monetlite.models.built import BuiltModel
from monetlite.models.builtin import builtin_names
from monetlite.models.registry import build_model

__all__ = ["BuiltModel", "build_model", "builtin_names"]
