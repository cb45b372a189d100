"""Small random training steps with asymmetric costs, so that no solver passes a test by symmetry."""

import random
from dataclasses import replace

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind


def random_profile(
    rng: random.Random,
    forward_operators: int | None = None,
    *,
    largest_bytes: int = 40,
    zero_latencies: bool = True,
    optional: bool = True,
    once_only: bool = True,
) -> Profile:
    """A random step: a branching forward graph, and backward operators that read activations and gradients.

    Args:
        rng: where every choice comes from.
        forward_operators: how many mandatory forward operators there are; 2 to 5 if not given.
        largest_bytes: the size of the largest value.
        zero_latencies: allow implementations that take no time.
        optional: allow optional operators (masks that only the backward pass reads).
        once_only: allow operators that can't be run again.
    """
    builder = _Builder(rng, largest_bytes, zero_latencies)
    count = rng.randint(2, 5) if forward_operators is None else forward_operators
    results: list[int] = []
    forward: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for position in range(count):
        sources = _sources(rng, results)
        last = position == count - 1
        writes = [builder.value(ValueKind.OUTPUT if last and rng.random() < 0.4 else ValueKind.ACTIVATION)]
        if rng.random() < 0.2:
            writes.append(builder.value(ValueKind.ACTIVATION))
        rerunnable = not (once_only and rng.random() < 0.12)
        variants = _variants(rng, sources, tuple(writes), again=True)
        # What only the backward part reads, an implementation may leave out.
        saves = len(writes) > 1 and rerunnable and rng.random() < 0.5
        if saves:
            variants.append((sources, (writes[0],), ()))
        builder.operator(Phase.FORWARD, variants, rerunnable=rerunnable)
        masks: tuple[int, ...] = ()
        if optional and rng.random() < 0.35:
            mask = builder.value(ValueKind.INTERMEDIATE, largest=max(1, largest_bytes // 6))
            source = rng.choice([*sources, *writes[: 1 if saves else None]])
            rerunnable = not (once_only and rng.random() < 0.1)
            builder.operator(Phase.FORWARD, [((source,), (mask,), ())], optional=True, rerunnable=rerunnable)
            masks = (mask,)
            if rng.random() < 0.25:
                # Made from the mask, as backward operators that read no gradient are.
                more = builder.value(ValueKind.INTERMEDIATE, largest=max(1, largest_bytes // 6))
                reads = tuple(sorted({mask, *rng.sample([*sources, *writes[: 1 if saves else None]], 1)}))
                builder.operator(Phase.FORWARD, [(reads, (more,), ())], optional=True)
                masks = (more,) if rng.random() < 0.5 else (mask, more)
        forward.append((sources, tuple(writes), masks))
        results.extend(writes[: 1 if saves else None])
    if rng.random() < 0.95:
        _backward(builder, forward)
    return builder.profile()


def with_backward_ways(rng: random.Random, profile: Profile) -> Profile:
    """The same step, where some backward operators need a mask, and some may overwrite forward values."""
    graph, operators, costs = profile.graph, list(profile.graph.operators), list(profile.costs)
    for index, operator in enumerate(operators):
        if operator.phase is not Phase.BACKWARD:
            continue
        ways = list(zip(operator.implementations, costs[index], strict=True))
        masks = [v for way, _ in ways for v in way.reads if operators[graph.writer[v]].optional]
        if masks and rng.random() < 0.5:
            mask = rng.choice(masks)
            ways = [(way, cost) for way, cost in ways if mask in way.reads]
        way, cost = rng.choice(ways)
        made = [
            v for v in way.reads if operators[graph.writer[v]].phase is Phase.FORWARD and not graph.values[v].held
        ]
        if made and rng.random() < 0.7:
            over = replace(way, name="over", overwrites=tuple({*way.overwrites, rng.choice(made)}))
            ways.append((over, replace(cost, latency_ms=cost.latency_ms * rng.choice([0.3, 1.0, 1.5]))))
        operators[index] = replace(operator, implementations=tuple(way for way, _ in ways))
        costs[index] = tuple(cost for _, cost in ways)
    return replace(profile, graph=replace(graph, operators=tuple(operators)), costs=tuple(costs))


def random_blocks(rng: random.Random, blocks: int, operators: int = 3) -> Profile:
    """A random step of so many blocks: only the last, small, result of one is read by the next."""
    builder = _Builder(rng, largest_bytes=40, zero_latencies=False)
    forward: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    results: list[int] = []
    for block in range(blocks):
        results = results[-1:]
        for at in range(operators):
            sources = _sources(rng, results) or tuple(results[-1:])
            last = at == operators - 1
            writes = (builder.value(ValueKind.ACTIVATION, largest=4 if last and block < blocks - 1 else None),)
            builder.operator(Phase.FORWARD, _variants(rng, sources, writes, again=True))
            masks: tuple[int, ...] = ()
            if rng.random() < 0.2:
                masks = (builder.value(ValueKind.INTERMEDIATE, largest=6),)
                builder.operator(Phase.FORWARD, [((rng.choice([*sources, *writes]),), masks, ())], optional=True)
            forward.append((sources, writes, masks))
            results.extend(writes)
    _backward(builder, forward)
    return builder.profile()


def _sources(rng: random.Random, results: list[int]) -> tuple[int, ...]:
    """What the next forward operator reads: mostly the latest results, sometimes an early one, or nothing."""
    if not results or rng.random() < 0.08:
        return ()
    chosen = {results[-1]} if rng.random() < 0.8 else {rng.choice(results)}
    if rng.random() < 0.3:
        chosen.add(rng.choice(results))
    return tuple(sorted(chosen))


def _variants(
    rng: random.Random, reads: tuple[int, ...], writes: tuple[int, ...], again: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Implementations (reads, writes, overwrites) with the same reads; some work in place."""
    variants = [(reads, writes, ())] * rng.choice([1, 1, 2, 3])
    if reads and again and rng.random() < 0.3:
        variants = [*variants, (reads, writes, (rng.choice(reads),))]
    return variants


def _backward(builder: "_Builder", forward: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> None:
    """One backward operator for each forward operator (two now and then), in reverse order."""
    rng = builder.rng
    gradients: dict[int, list[int]] = {}
    start: int | None = None
    for sources, writes, masks in reversed(forward):
        incoming = [gradient for value in writes for gradient in gradients.get(value, [])]
        if not incoming:
            if start is None:
                start = builder.value(rng.choice([ValueKind.GRADIENT, ValueKind.TANGENT]))
                loss_reads = tuple(sorted(set(rng.sample(writes, rng.randint(0, len(writes))))))
                builder.operator(Phase.BACKWARD, [(loss_reads, (start,), ())])
            incoming = [start]
        outputs: list[int] = []
        for source in sources:
            gradient = builder.value(ValueKind.GRADIENT)
            gradients.setdefault(source, []).append(gradient)
            outputs.append(gradient)
        parameter = builder.value(ValueKind.PARAM_GRAD, largest=6) if rng.random() < 0.5 else None
        if parameter is not None and outputs and rng.random() < 0.4:
            choices = [(*sources, *incoming)]
            builder.operator(Phase.BACKWARD, [(reads, (parameter,), ()) for reads in choices])
            parameter = None
        written = (*outputs, *(() if parameter is None else (parameter,)))
        if not written:
            written = (builder.value(ValueKind.PARAM_GRAD, largest=3),)
        variants = [((*reads, *incoming), written, ()) for reads in _needs(rng, sources, writes, masks)]
        if rng.random() < 0.2:
            reads = variants[0][0]
            variants.append((reads, written, (incoming[0],)))
        builder.operator(Phase.BACKWARD, variants)


def _needs(
    rng: random.Random, sources: tuple[int, ...], writes: tuple[int, ...], masks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Which activations each backward implementation reads: its input, output, both, a mask or nothing."""
    choices = [sources, (writes[0],), tuple(sorted({*sources, *writes}))]
    needs = rng.sample(choices, rng.choice([1, 1, 2]))
    if rng.random() < 0.15:
        needs = [()]
    needs += [masks] if masks else []
    return needs + ([rng.choice(needs)] if rng.random() < 0.3 else [])


class _Builder:
    """Collects operators and values, and makes up what they cost."""

    def __init__(self, rng: random.Random, largest_bytes: int, zero_latencies: bool) -> None:
        self.rng = rng
        self.largest_bytes = largest_bytes
        self.zero_latencies = zero_latencies
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.costs: list[tuple[Cost, ...]] = []

    def value(self, kind: ValueKind, largest: int | None = None) -> int:
        size_bytes = self.rng.randint(1, self.largest_bytes if largest is None else largest)
        self.values.append(Value(name=f"v{len(self.values)}", kind=kind, size_bytes=size_bytes))
        return len(self.values) - 1

    def operator(
        self,
        phase: Phase,
        variants: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
        *,
        optional: bool = False,
        rerunnable: bool = True,
    ) -> None:
        implementations = tuple(
            Implementation(
                name=f"way{index}", reads=tuple(dict.fromkeys(reads)), writes=writes, overwrites=overwrites
            )
            for index, (reads, writes, overwrites) in enumerate(variants)
        )
        self.operators.append(
            Operator(
                name=f"op{len(self.operators)}",
                family=phase.value,
                phase=phase,
                implementations=implementations,
                optional=optional,
                rerunnable=rerunnable,
            )
        )
        self.costs.append(tuple(self._cost() for _ in implementations))

    def _cost(self) -> Cost:
        rng = self.rng
        latency_ms = 0.0 if self.zero_latencies and rng.random() < 0.1 else rng.randint(1, 4000) / 100
        workspace_bytes = rng.choice([0, 0, rng.randint(1, self.largest_bytes), -rng.randint(0, 3)])
        if rng.random() < 0.25:
            return Cost(
                latency_ms=latency_ms,
                workspace_bytes=workspace_bytes,
                recompute_latency_ms=latency_ms * rng.choice([0.5, 1.5]),
                recompute_workspace_bytes=rng.choice([None, rng.randint(0, self.largest_bytes)]),
            )
        return Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes)

    def profile(self) -> Profile:
        graph = OperatorGraph(
            name="random",
            operators=tuple(self.operators),
            values=tuple(self.values),
            resident=Resident(parameters=self.rng.randint(0, 20)),
        )
        return Profile(graph=graph, device="cpu", kind=ProfileKind.ESTIMATED, costs=tuple(self.costs))
