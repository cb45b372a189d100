"""Models as profile files describe them: traced and priced elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monetlite.core.costs import Profile, load_profile
from monetlite.core.errors import ModelError
from monetlite.core.graph import AS_TRACED


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """Profiles of one step, the first as plain training runs it, and what to call it."""

    profiles: list[Profile]
    batch: int
    description: str


def load_profiles(paths: Sequence[str], layout: str | None, given: Mapping[str, object]) -> Profiled:
    """Read profile files of one training step in different layouts.

    Args:
        layout: what a person wants solved, if they say.
        given: options that say again what files say.

    Raises:
        ModelError: an option contradicts the files, they are of different steps, or the layout is not there.
        ScheduleFileError: a file can't be read.
    """
    if said := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
        raise ModelError(f"a profile says what {', '.join(said)} would; leave that out, or profile again with it")
    loaded = sorted(map(load_profile, paths), key=lambda profile: profile.graph.layout != AS_TRACED)
    first = loaded[0]
    if first.graph.layout != AS_TRACED:
        raise ModelError(
            f"{_of(first)}: give the profile of the step as traced, too; budgets in percent and overheads are "
            "relative to that"
        )
    for other in loaded[1:]:
        if other.graph.layout == first.graph.layout or (
            (other.graph.name, other.graph.inputs, other.device, other.optimizer, other.accumulate)
            != (first.graph.name, first.graph.inputs, first.device, first.optimizer, first.accumulate)
        ):
            raise ModelError(
                f"the profiles are not of one step in different layouts: {_of(first)}, and {_of(other)}"
            )
    if layout is not None and layout not in [profile.graph.layout for profile in loaded]:
        raise ModelError(f"no profile is of a step in layout {layout!r}; give one made with --layout {layout}")
    sizes = [spec.shape[0] for spec in first.graph.inputs.values() if spec.shape]
    batch = first.source.batch if first.source else sizes[0] if sizes else 1
    return Profiled(profiles=loaded, batch=batch, description=_of(first))


def _of(profile: Profile) -> str:
    shapes = ", ".join("×".join(map(str, spec.shape)) for spec in profile.graph.inputs.values())
    return f"{profile.graph.name} on {shapes}, {profile.graph.layout}, {profile.kind} for {profile.device}"


__all__ = ["Profiled", "load_profiles"]
