"""Answers to "does my training fit this card, and what is the fastest setting?"."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from monetlite.allocator import least_limit, reserve
from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.devices import CONTEXT_BYTES, Device, known_devices
from monetlite.core.errors import MonetliteError, ScheduleMismatch
from monetlite.core.graph import AS_TRACED, TILED_ROWS, Resident, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.step_analysis import Holding, StepAnalysis
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes
from monetlite.models.equal_layers import are_all_layers, find_layers
from monetlite.planning.advice import LOSS_FAMILIES, LeastPeak, Setting
from monetlite.planning.model_steps import ModelSteps
from monetlite.planning.size_costs import SizedStep, largest, telling_sizes
from monetlite.solving import solve_profile
from monetlite.solving.baselines import layer_checkpointing, sqrt_checkpointing, with_lighter_implementations
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.clock import now
from monetlite.solving.problem import Problem

GAPS_SHARE = 0.04
"""Part of a card that is left to gaps between tensors. Computed for language models: at most 3% of the peak."""
EVERY = (1, 2, 3, 4, 6, 8)
"""Settings of `every_n_layers` that are tried, the leanest first."""
HOPELESS = 1.02
"""Budgets below this multiple of what any schedule needs are not searched."""
MAX_BATCH, MAX_LENGTH = 2**14, 2**22
LENGTHS = {False: 8, True: 128}
"""Lengths are told in multiples of this, for short and for long sequences."""
MAX_MISS = 0.01
"""Relative error of a peak by its powers from which nothing is told of other sizes."""
COMPILING_SECONDS = 20.0
"""Most time to wait for the solver's code, which the first command after an installation compiles."""
PLANS_SHARE, MIN_SECONDS = 0.6, 0.5
"""Part of the time for plans of layers; the least time of a solve."""
WORTH = 0.01
"""Part of the step's time that a schedule has to save where plain training fits."""
LOGITS = "logits and loss"


@dataclass(frozen=True)
class CardMemory:
    """Memory of a card, and the budget that is left of it.

    Attributes:
        name, title: of the card; a machine's memory has the name `cpu`.
        total_bytes: of the card, as torch reports it.
        given_bytes: the budget, if one was given.
    """

    name: str
    title: str
    total_bytes: int
    given_bytes: int | None = None

    @property
    def context_bytes(self) -> int:
        """Memory of CUDA itself."""
        return 0 if self.name == "cpu" else CONTEXT_BYTES

    @property
    def gaps_bytes(self) -> int:
        """Memory of gaps between tensors."""
        return int(GAPS_SHARE * self.total_bytes)

    @property
    def budget_bytes(self) -> int:
        """Memory for the training step, as given or what is left."""
        return self.given_bytes or self.left_bytes

    @property
    def left_bytes(self) -> int:
        """Memory of the card beside CUDA and gaps."""
        return self.total_bytes - self.context_bytes - self.gaps_bytes

    @property
    def reservable_bytes(self) -> int:
        """Memory that torch's allocator can reserve."""
        return self.total_bytes - self.context_bytes

    @property
    def is_left(self) -> bool:
        """True on a GPU whose budget is what is left of it, and not given."""
        return self.name != "cpu" and self.budget_bytes == self.left_bytes


@dataclass(frozen=True, kw_only=True)
class FitSetting(StepAnalysis):
    """One way to run the training step on a card.

    Attributes:
        every: layers between those that are checkpointed; 0 for plain training, and for schedules.
        tolerance: of a schedule; None for anything else.
    """

    every: int = 0
    tolerance: float | None = None

    @cached_property
    def reserved_bytes(self) -> int:
        """Memory that torch's allocator reserves for it by default."""
        return reserve(self.profile, self.steps, expandable=False).peak_bytes

    @cached_property
    def least_reserved_bytes(self) -> int:
        """The least that it can reserve with expandable segments, which give memory back before it runs out."""
        return least_limit(self.profile, self.steps)


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """The largest sizes within the budget, each at the other one that was asked for; 0 where none fits.

    Attributes:
        batch: samples. length: tokens; None for a model of images, and where it is not known.
        bounded: the length is the longest that the model takes, so that memory is not what bounds it.
    """

    batch: int
    length: int | None
    bounded: bool = False


PLAINLY, CHECKPOINTED, PLANNED = "as it is", "checkpointing layers", "monetlite"
"""Ways to train that have limits of their own."""


@dataclass(frozen=True, kw_only=True)
class CardFit:
    """The answer.

    Attributes:
        card: its memory.
        batch, length: sizes that were asked for; no length for a model of images.
        plain: training as it is.
        checkpointed: the fastest setting of checkpointing layers that fits, or the leanest; None without layers.
        planned: monetlite's schedules that fit, with the same bits and with the loss in tiles; where plain training
            fits, those that are faster.
        proven_bytes: no schedule of either kind needs less.
        lean: the ways with small peaks.
        limits: the largest batch and length, by way to train; None where they are not known, and nothing where no
            other sizes were traced.
    """

    card: CardMemory
    batch: int
    length: int | None
    plain: FitSetting
    checkpointed: FitSetting | None
    planned: tuple[FitSetting, ...]
    proven_bytes: int
    lean: tuple[FitSetting, ...]
    limits: Mapping[str, SizeLimits | None] = field(default_factory=dict)

    def fits(self, way: FitSetting) -> bool:
        """True if the tensors fit, and what torch's allocator has to reserve for them."""
        tensors_fit = way.peak_bytes <= self.card.budget_bytes
        return tensors_fit and (
            not self.needs_expandable(way) or way.least_reserved_bytes <= self.card.reservable_bytes
        )

    def needs_expandable(self, way: FitSetting) -> bool:
        """True if torch's allocator reserves more than the card has, unless its segments can grow and shrink."""
        return self.card.is_left and way.reserved_bytes > self.card.reservable_bytes

    @property
    def ways(self) -> tuple[FitSetting, ...]:
        return (self.plain, *([self.checkpointed] if self.checkpointed else []), *self.planned)

    @cached_property
    def fastest(self) -> FitSetting | None:
        """The fastest way that fits; the simplest of equally fast ones."""
        return min(filter(self.fits, self.ways), key=lambda way: way.latency_ms, default=None)

    @property
    def leanest(self) -> FitSetting:
        """The way with the smallest peak that is known."""
        return min(self.lean, key=lambda way: way.peak_bytes)

    @cached_property
    def helpful(self) -> tuple[Setting, ...]:
        """Changes that lower the smallest peak, where nothing fits."""
        profile, timeline = self.leanest.profile, self.leanest.timeline
        others = tuple(way.steps for way in self.lean if way.profile is profile)
        least = LeastPeak(profile=profile, timeline=timeline, others=others)
        return () if self.fastest else least.settings(self.card.budget_bytes)

    @cached_property
    def larger_card(self) -> CardMemory | None:
        """The smallest known card on which the leanest way fits, where nothing fits here; or None."""
        cards = [] if self.fastest else [card_memory(device) for device in known_devices().values()]
        fitting = [card for card in cards if card.budget_bytes >= self.leanest.peak_bytes]
        return min(fitting, key=lambda card: card.total_bytes, default=None)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """Memory at plain training's peak by the purposes that people ask for; activations apart from logits."""
        plain = self.plain
        graph, held = plain.graph, plain.peak_bytes_of
        losses = [operator for operator in graph.operators if operator.family.startswith(LOSS_FAMILIES)]
        touched = {value for item in losses for value in (*item.implementations[0].reads, *item.writes)}
        counts = {math.prod(graph.values[value].shape) for value in touched if len(graph.values[value].shape) > 1}
        inner = (Holding.STORED, Holding.RECOMPUTED, Holding.GRADIENTS)
        logits = sum(
            graph.values[stay.value].size_bytes
            for stay in plain.held_at(plain.timeline.peak_step)
            if plain.holding(stay) in inner and math.prod(graph.values[stay.value].shape) in counts
        )
        return {
            "weights": held[Holding.WEIGHTS],
            "gradients": held[Holding.WEIGHT_GRADIENTS],
            "optimizer": held[Holding.OPTIMIZER],
            "activations": sum(held[item] for item in inner) - logits,
            LOGITS: logits,
            "inputs, workspace": held[Holding.INPUTS] + held[Holding.WORKSPACE],
        }


def fit_card(
    model: ModelSteps,
    card: CardMemory,
    solving: SolvingOptions,
    progress: Callable[[str], None] | None = None,
) -> CardFit:
    """Find out whether a training step fits a card, and the fastest way to run it there.

    Args:
        model: to train.
        card: to train on.
        solving: the time limit is of all searches together.
        progress: told what comes next.

    Raises:
        TraceError: the model can't be captured.
    """
    from monetlite.solving.annealing.compiling import begin_compiling

    tell = progress or (lambda text: None)
    begin_compiling()
    tell("tracing")
    path = find_layers(model.built.model)  # before some of them are left out
    profiles = model.priced()
    sized_steps = _begin_sized_steps(model, profiles)
    exact = profiles[AS_TRACED].within(0.0)
    tolerant = profiles.get(TILED_ROWS)  # at a tolerance that allows it
    eager = _by_pytorch(exact)
    plain = FitSetting.of_steps(eager, plain_steps(eager.graph))
    tell("trying settings of checkpointing")
    settable = path if path and are_all_layers(model.built.model, path) else None
    checkpointed = _checkpointed(eager, settable, card.budget_bytes)
    every = checkpointed.every if checkpointed else 1
    searches = [_Search(exact, 0.0, path, every, solving, card.budget_bytes)]
    if tolerant is not None:
        searches.append(_Search(tolerant, solving.tolerance, path, every, solving, card.budget_bytes))
    proven_bytes = min(search.proven_bytes for search in searches)
    searches = [search for search in searches if search.possible] or searches[-1:]
    seconds = solving.time_limit / max(1, sum(search.possible for search in searches))
    most_ms = (1 - WORTH) * plain.latency_ms if plain.peak_bytes <= card.budget_bytes else math.inf
    planned, lean = [], [way for way in (plain, checkpointed) if way]
    for search in searches:
        tell(f"planning within {format_bytes(card.budget_bytes)}, tolerance {search.tolerance:g}")
        # What differs in bits can do all that has the same bits, so its leanest schedule is leaner.
        last = search is searches[-1]
        found, least = search.run(seconds if search.possible else MIN_SECONDS, wanted=search.possible, lean=last)
        lean.append(least)
        planned += [found] if found and found.latency_ms < most_ms else []
    tell("looking for the largest batch and length")
    wrapped = list(layer_ways(exact, settable, (1,)))
    kinds = {PLAINLY: [plain], CHECKPOINTED: wrapped, PLANNED: [*lean[-len(searches) :], *searches[-1].lightest()]}
    return CardFit(
        card=card,
        batch=model.batch,
        length=model.length,
        plain=plain,
        checkpointed=checkpointed,
        planned=tuple(planned),
        proven_bytes=proven_bytes,
        lean=tuple(lean),
        limits=_limits(card.budget_bytes, model, sized_steps(), kinds),
    )


def _by_pytorch(profile: Profile) -> Profile:
    """A step as PyTorch runs it: on a CPU, its dropout keeps a mask of its input's dtype, not of booleans."""
    if profile.device != "cpu":
        return profile
    values = list(profile.graph.values)
    for operator in profile.graph.operators:
        if operator.family == "dropout":
            output, mask = operator.writes
            values[mask] = replace(values[mask], size_bytes=values[output].size_bytes)
    return replace(profile, graph=replace(profile.graph, values=tuple(values)))


def layer_ways(profile: Profile, path: str | None, settings: Sequence[int] = EVERY) -> Iterator[FitSetting]:
    """Settings of checkpointing a model's layers; none without layers."""
    for every in settings if path is not None else ():
        yield FitSetting.of_steps(profile, layer_checkpointing(profile, path or "", every), every=every)


def _checkpointed(profile: Profile, path: str | None, budget_bytes: int) -> FitSetting | None:
    """The fastest setting that fits, or the leanest one."""
    found = None
    for way in layer_ways(profile, path):
        fits = way.peak_bytes <= budget_bytes
        if fits or found is None:
            found = way
        if not fits:
            break
    return found


@dataclass(frozen=True)
class _Search:
    """Schedules of one layout of the step, never slower than the setting `every` of checkpointing layers."""

    profile: Profile
    tolerance: float
    path: str | None
    every: int
    solving: SolvingOptions
    budget_bytes: int

    @cached_property
    def proven_bytes(self) -> int:
        return smallest_budget_bound(Problem.of(self.profile))

    @property
    def possible(self) -> bool:
        return HOPELESS * self.proven_bytes <= self.budget_bytes

    def run(self, seconds: float, *, wanted: bool, lean: bool) -> tuple[FitSetting | None, FitSetting]:
        """The fastest schedule found within the budget, looked for if `wanted`, and the leanest one, if `lean`."""
        from monetlite.solving.annealing.compiling import ensure_compiled
        from monetlite.solving.blocks.layer_plans import LayerPlans

        baselines = [sqrt_checkpointing(self.profile)]
        baselines += [way.steps for way in layer_ways(self.profile, self.path, sorted({1, self.every}))]
        known = [with_lighter_implementations(self.profile, steps, self.budget_bytes) for steps in baselines]
        lean_bytes = min(self._way(steps).peak_bytes for steps in known)
        fitting: list[tuple[Step, ...]] = []
        planned = False
        if self.path is not None and ensure_compiled(now() + COMPILING_SECONDS):
            plans = LayerPlans(
                self.profile,
                self.path,
                seconds=PLANS_SHARE * seconds,
                seed=self.solving.seed,
            )
            planned = plans.deep is not None
            fitting += filter(None, [plans.within(self.budget_bytes) if wanted else None])
            known += filter(None, [plans.leanest(lean_bytes) if lean else None])
        if not fitting and not planned and (wanted or lean):
            options = replace(self.solving, tolerance=self.tolerance, time_limit=max(MIN_SECONDS, seconds))
            found = solve_profile(self.profile, self.budget_bytes, options, starts=known)
            fitting += filter(None, [found.steps])
            known += filter(None, [found.smallest_reached_steps])
        leanest = min(map(self._way, [*known, *fitting]), key=lambda way: way.peak_bytes)
        ways = [way for way in map(self._way, [*known, *fitting]) if way.peak_bytes <= self.budget_bytes]
        return min(ways, key=lambda way: way.latency_ms, default=None), leanest

    def lightest(self) -> Iterator[FitSetting]:
        """Every layer checkpointed and every operator by its lightest way: lean at other sizes, too.

        The leanest schedule of a small batch may store all of its activations, where weights and their gradients
        make its peak. So these are left out.
        """
        graph = self.profile.graph
        values = tuple(
            replace(value, size_bytes=0) if value.kind is ValueKind.PARAM_GRAD else value for value in graph.values
        )
        activations = replace(self.profile, graph=replace(graph, values=values, resident=Resident()))
        for way in layer_ways(activations, self.path, (1,)):
            yield self._way(with_lighter_implementations(activations, way.steps, 0))

    def _way(self, steps: tuple[Step, ...]) -> FitSetting:
        return FitSetting.of_steps(self.profile, steps, tolerance=self.tolerance)


def card_memory(device: Device, budget_bytes: int | None = None) -> CardMemory:
    """Memory of a known card."""
    return CardMemory(device.name, device.title, device.torch_bytes, budget_bytes)


def _limits(
    budget_bytes: int, model: ModelSteps, steps: Mapping[str, SizedStep], kinds: Mapping[str, Sequence[FitSetting]]
) -> dict[str, SizeLimits | None]:
    """The largest batch and length of each kind of way, by any of its ways."""
    batch, length = model.batch, model.length or 0
    config = getattr(model.built.model, "config", None)
    own_longest = getattr(config, "max_position_embeddings", None)
    longest = own_longest or MAX_LENGTH
    window = getattr(config, "sliding_window", None)
    unit = LENGTHS[length >= 8 * LENGTHS[True]]

    def limit(way: FitSetting) -> SizeLimits | None:
        sized = steps.get(way.profile.graph.layout)
        if sized is None:  # of sizes at which this layout differs in nothing
            return None
        try:
            peak = sized.peak(Choices.of_steps(way.profile.graph, way.steps).steps(sized.profile.graph))
        except ScheduleMismatch:  # other operators run at the telling sizes
            return None
        if abs(peak(batch, length) - way.peak_bytes) > MAX_MISS * way.peak_bytes:
            return None
        most = largest(lambda count: peak(count, length) <= budget_bytes, MAX_BATCH)
        if not sized.sizes.length:
            return SizeLimits(batch=most, length=None)
        count = largest(lambda count: peak(batch, count * unit) <= budget_bytes, longest // unit)
        bounded = longest == own_longest and count == longest // unit and peak(batch, longest) <= budget_bytes
        tokens = longest if bounded else count * unit
        # From a sliding window's length on, attention has a mask, and another kernel.
        known = window is None or length >= window or tokens < window
        return SizeLimits(batch=most, length=tokens if known else None, bounded=bounded)

    found: dict[str, SizeLimits | None] = {}
    for kind, ways in kinds.items() if steps else ():
        known = [limits for way in ways if (limits := limit(way)) is not None]
        if ways:
            found[kind] = None
        if known:
            lengths = [limits.length for limits in known if limits.length is not None]
            most = max(lengths) if len(lengths) == len(known) else None
            bounded = any(limits.bounded for limits in known)
            found[kind] = SizeLimits(batch=max(limits.batch for limits in known), length=most, bounded=bounded)
    return found


def _begin_sized_steps(model: ModelSteps, asked: Mapping[str, Profile]) -> Callable[[], dict[str, SizedStep]]:
    """Begin to trace the step at telling sizes, beside the one at the sizes that were asked for.

    Returns:
        Waits for the steps, by layout: nothing if the model has no such sizes, and on a CPU, as it takes minutes.
    """
    tensors = (*model.built.model.parameters(), *model.built.model.buffers())
    sizes = telling_sizes({size for tensor in tensors for size in tensor.shape}, model.length)
    if sizes is None or model.pricing.device == "cpu":
        return dict
    priced = model.begin_priced(sizes.batch, sizes.length or None)

    def steps() -> dict[str, SizedStep]:
        try:
            profiles = priced()
        except MonetliteError:
            return {}  # a model of a person's own that takes no batch
        own, sized = ({**of, AS_TRACED: of[AS_TRACED].within(0.0)} for of in (asked, profiles))
        return {
            layout: SizedStep(profile, sizes, own[layout], model.batch, model.length or 0)
            for layout, profile in sized.items()
            if layout in own
        }

    return steps
