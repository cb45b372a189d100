"""Models by name: the MONeT paper's five and their relatives, other libraries' models, and people's own."""

from monetlite.models.built_model import BuiltModel
from monetlite.models.model_names import build_model, builtin_names, check_spelling

__all__ = ["BuiltModel", "build_model", "builtin_names", "check_spelling"]
