"""Configurations of published models, which come along: nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model.

    Attributes:
        hub_name: its name on the hub, as `from_pretrained` takes it; without a slash, a name that only we know.
        millions: its parameters, in millions, as published.
        config: arguments of transformers' `AutoConfig.for_model`, of which the first is `model_type`.
    """

    hub_name: str
    millions: float
    config: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        """The last part of its name, by which schedules and commands call it."""
        return self.hub_name.rpartition("/")[2].lower()


@cache
def published_models() -> Mapping[str, PublishedModel]:
    """All published models, by short name."""
    text = resources.files(__package__).joinpath("published.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)["models"].items()
    made = (PublishedModel(hub_name=name, **entry) for name, entry in entries)
    return MappingProxyType({model.short_name: model for model in made})


def find_published(name: str) -> PublishedModel | None:
    """A published model by its name on the hub, or the last part of it, in any case; None if there is none."""
    found = published_models().get(name.rpartition("/")[2].lower())
    return found if found is not None and name.lower() in (found.short_name, found.hub_name.lower()) else None
