"""MONeT's published schedules, read without running anything in them, to stand beside ours.

They are pickles of two objects, written by its solvers in 2020: `SolverInfo` (the problem) and `Solution`. The
first holds the operators of the training step with measured costs, so that the second can be replayed under the
rules of `simulate`.

Fields, after the solvers of Shah et al. (ICLR 2021, section 4). Nodes are numbered: forward operators and packed
intermediates, the loss, backward operators. Stage 0 is the forward pass; each later stage prepares and runs one
backward operator.

| field | meaning |
| --- | --- |
| `r[t, v]`, `s[t, v]` | node v runs in stage t; its result is kept from stage t - 1 to stage t |
| `m[t, p]` | the backward operator of stage t reads by option p |
| `rf[t, c, a]` | convolution c runs with algorithm a |
| `ip[t, v]` | node v overwrites what it reads |
| `runtime_expected` | the objective, in 0.01 ms |
| `workspace_compute`, `workspace_mem` | of each option or algorithm: ms (below 0: it failed) and MiB |

Checkmate's solutions have a stage for every node, and no options.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import IllegalSchedule, ScheduleFileError
from monetlite.core.files.plain_data import shown
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.planning.budgets import solve
from monetlite.zoo.collection import ZooEntry, fastest, matching
from monetlite.zoo.monet_pickles import StandIn, as_array, as_number, load_pickle

MS_PER_UNIT = 0.01
MAX_NODES, MAX_OPTIONS, MAX_READS, MAX_STEPS = 10**4, 64, 256, 10**6
"""Sizes beyond which a file is not MONeT's: its largest graphs have some hundred nodes."""
_FILE_NAME = re.compile(
    r"solution_(?P<model>.+?)_(?P<batch>\d+)_(?P<mode>[a-z_]+?)_(?P<budget>\d+(?:\.\d+)?)(?:_|\.pkl)"
)
_MODELS = {"un": "unet"}
"""Our names of models that MONeT calls otherwise."""


@dataclass(frozen=True, kw_only=True)
class MonetReplay:
    """A published schedule under the rules of `simulate`, by the costs in its own file.

    Attributes:
        objective: latency in units of 0.01 ms. latency_ms: the same in ms.
        peak_bytes: most memory that a step has allocated.
        fastest_ms: latency of every operator once, each by its fastest implementation.
        overhead: latency over `fastest_ms`, less one.
    """

    objective: int
    latency_ms: float
    peak_bytes: int
    fastest_ms: float
    overhead: float


@dataclass(frozen=True, kw_only=True)
class MonetSolution:
    """A published schedule.

    Attributes:
        model: our name of the model. mode: MONeT's name of the choices that its solver had.
        method: MONeT or Checkmate.
        batch: samples of a training step. budget_gib: the budget, from the file's name; None if it has none.
        operators: forward operators by name, in order, packed intermediates included.
        stored: forward operators whose results are kept after the forward pass, by index.
        runs_again: re-runs of each forward operator.
        objective: what the solver reached, in 0.01 ms on the authors' P100; None if the file does not say.
        latency_ms: the same in ms. solve_seconds: how long it took, if the file says.
        replay: what `simulate` gives for it; None where it can't be replayed. replay_problem: the reason.
        profile, steps: the graph and costs in the file, and the schedule's steps on it; None as `replay`.
    """

    model: str
    mode: str
    method: str
    batch: int
    budget_gib: float | None
    operators: tuple[str, ...]
    stored: tuple[int, ...]
    runs_again: tuple[int, ...]
    objective: float | None
    latency_ms: float | None
    solve_seconds: float | None
    replay: MonetReplay | None
    replay_problem: str
    profile: Profile | None
    steps: tuple[Step, ...]

    def data(self) -> dict[str, Any]:
        """The figures as plain data."""
        figures = {item.name: getattr(self, item.name) for item in fields(self)}
        del figures["profile"], figures["steps"]
        return figures | {"replay": None if self.replay is None else vars(self.replay)}


def read_monet(path: str | PathLike[str]) -> MonetSolution:
    """Read one of MONeT's or Checkmate's solution files. Nothing in it is executed.

    Raises:
        ScheduleFileError: it can't be read, is too large, names anything but MONeT's classes and plain data, or is
            no solution; says what and where.
    """
    loaded = load_pickle(path)
    try:
        return _solution(loaded, Path(path).name)
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{path}: {error}") from None
    except Exception as error:  # anything else may stand where a solution has something
        reason = f"{type(error).__name__}: {error}"
        raise ScheduleFileError(f"{path} is not a MONeT solution: {reason:.200}") from error


def similar_entry(solution: MonetSolution, entries: Sequence[ZooEntry]) -> ZooEntry | None:
    """Find the fastest schedule of the same model and batch for the same device that keeps within the same budget.

    Schedules that make the same bits as plain training come first.
    """
    if solution.budget_gib is None:
        return None
    budget = f"{solution.budget_gib:.6f}GiB"
    known = matching(entries, model=solution.model, device="p100", budget=budget, batch=solution.batch)
    fitting = [entry for entry in known if entry.batch == solution.batch]
    exact = [entry for entry in fitting if entry.tolerance == 0]
    return fastest(exact or fitting) if fitting else None


def solve_again(solution: MonetSolution, time_limit: float) -> Schedule:
    """Solve on the graph and the costs in a solution's file, within its budget, or else within its peak.

    Raises:
        ScheduleFileError: the file's schedule can't be replayed, so that its graph is in doubt.
        InfeasibleBudget: nothing fits, or nothing was found in time.
    """
    if solution.profile is None or solution.replay is None:
        raise ScheduleFileError(f"the graph in the file can't be solved for: {solution.replay_problem}")
    budget = solution.replay.peak_bytes if solution.budget_gib is None else int(solution.budget_gib * 2**30)
    return solve(solution.profile, budget, time_limit=time_limit)


def _solution(loaded: Any, file_name: str) -> MonetSolution:
    kinds = [type(item).__name__ for item in loaded[:3]] if isinstance(loaded, (list, tuple)) else []
    if len(kinds) != 2 or not kinds[0].endswith("SolverInfo") or not kinds[1].endswith("Solution"):
        raise ScheduleFileError("is not a MONeT solution, which is a pair of SolverInfo and Solution")
    info, solution = loaded
    nodes, loss = info["nodes"], info["loss"]
    nodes = dict(enumerate(nodes)) if isinstance(nodes, list) else nodes
    if not isinstance(nodes, dict) or not isinstance(loss, int) or not 0 < loss < len(nodes) <= MAX_NODES:
        raise ScheduleFileError(f"SolverInfo has {shown(loss)} as its loss, which is none of its nodes")
    if solution.get("r") is None:
        raise ScheduleFileError("holds no schedule: its solver found none")
    runs, kept = (None if solution.get(name) is None else as_array(solution[name]) > 0.5 for name in ("r", "s"))
    assert runs is not None
    stages, count = len(nodes) - loss, len(nodes)
    checkmate = runs.shape == (count, count)
    expected = ((count, count), (count, count)) if checkmate else ((stages, loss + 1), (stages + 1, loss + 1))
    kept = np.zeros(expected[1], dtype=bool) if kept is None else kept
    if (runs.shape, kept.shape) != expected:
        raise ScheduleFileError(
            f"r and s have the shapes {runs.shape} and {kept.shape}; for {loss} forward operators and {stages} "
            f"stages they should be {expected[0]} and {expected[1]}"
        )
    objective, seconds = (_known(solution, name) for name in ("runtime_expected", "solve_time"))
    found = _FILE_NAME.search(file_name)
    named: dict[str, Any] = found.groupdict() if found else {}
    model = _text(info.get("model_name", named.get("model")), "model_name")
    batch = int(named["batch"]) if info.get("bs") is None and named else int(as_number(info.get("bs"), "bs"))
    profile: Profile | None = None
    steps: tuple[Step, ...] = ()
    replay, problem = None, ""
    try:
        profile = _profile(info, nodes, loss, model, math.ceil if not checkmate else round)
        steps = _steps(profile.graph, info, solution, loss, runs)
        timeline = simulate(profile, steps)
        objective_now = round(timeline.latency_ms / MS_PER_UNIT)
        fastest_ms = sum(
            min(cost.latency_ms for cost in costs)
            for operator, costs in zip(profile.graph.operators, profile.costs, strict=True)
            if not operator.optional
        )
        replay = MonetReplay(
            objective=objective_now,
            latency_ms=objective_now * MS_PER_UNIT,
            peak_bytes=timeline.peak_bytes,
            fastest_ms=fastest_ms,
            overhead=timeline.latency_ms / fastest_ms - 1 if fastest_ms > 0 else 0.0,
        )
    except Exception as error:  # a file may lack anything; what it chose is known all the same
        known = isinstance(error, (ScheduleFileError, IllegalSchedule))
        profile, steps, problem = None, (), str(error) if known else f"{type(error).__name__}: {error}"
    return MonetSolution(
        model=_MODELS.get(model, model),
        mode=_mode(info, model, batch, named),
        method="Checkmate" if checkmate else "MONeT",
        batch=batch,
        budget_gib=float(named["budget"]) if named else None,
        operators=tuple(_text(nodes[index].get("op"), "op") for index in range(loss)),
        stored=tuple(int(index) for index in np.flatnonzero(kept[loss + 1 if checkmate else 1, :loss])),
        runs_again=tuple(map(int, runs[:, :loss].sum(axis=0) - 1 if checkmate else runs[1:, :loss].sum(axis=0))),
        objective=objective,
        latency_ms=None if objective is None else objective * MS_PER_UNIT,
        solve_seconds=seconds,
        replay=replay,
        replay_problem=problem,
        profile=profile,
        steps=steps,
    )


def _known(solution: StandIn, name: str) -> float | None:
    """A figure of a solution; None where it is missing, or -1, which the solvers write for what they don't know."""
    number = None if solution.get(name) is None else as_number(solution[name], name)
    return None if number is None or number < 0 else number


def _mode(info: StandIn, model: str, batch: int, named: dict[str, Any]) -> str:
    """The mode as the solver was given it: the field `mode` itself lacks the prefix `inplace_`."""
    whole, prefix = info.get("data_path"), f"{model}_{batch}_"
    if isinstance(whole, str) and whole.startswith(prefix):
        return _text(whole.removeprefix(prefix), "mode")
    return _text(info.get("mode", named.get("mode")), "mode")


def _profile(
    info: StandIn, nodes: dict[int, StandIn], loss: int, model: str, rounded: Callable[[float], int]
) -> Profile:
    """The training step and its costs, as the solver saw them.

    Values are the results of the nodes, by number. Behind them come gradients of parameters: `fixed_mem` grows by
    their size where a backward operator writes some.
    """
    count = len(nodes)
    sizes = [_whole(nodes[index], "mem") for index in range(count)]
    fixed = [_whole(nodes[index], "fixed_mem") for index in range(count)]
    kinds = [
        ValueKind.GRADIENT
        if index > loss
        else ValueKind.INTERMEDIATE
        if _is_intermediate(nodes[index])
        else ValueKind.ACTIVATION
        for index in range(count)
    ]
    values = [
        Value(name=f"{index}:result", kind=kind, size_bytes=size)
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    operators: list[Operator] = []
    costs: list[tuple[Cost, ...]] = []
    for index in range(count):
        writes = [index]
        if index and fixed[index] > fixed[index - 1]:
            writes.append(len(values))
            added_bytes = fixed[index] - fixed[index - 1]
            values.append(Value(name=f"{index}:parameters", kind=ValueKind.PARAM_GRAD, size_bytes=added_bytes))
        offered = _offered(info, nodes[index], index, loss, sizes, rounded)
        if not offered:
            raise ScheduleFileError(f"node {index} has no implementation that worked")
        family = _text(nodes[index]["op"], "op")
        operators.append(
            Operator(
                name=f"{index}:{family}",
                family=family,
                phase=Phase.FORWARD if index <= loss else Phase.BACKWARD,
                implementations=tuple(
                    Implementation(name=name, reads=reads, writes=tuple(writes), overwrites=overwrites)
                    for name, reads, overwrites, _ in offered
                ),
                optional=_is_intermediate(nodes[index]),
            )
        )
        costs.append(tuple(cost for _, _, _, cost in offered))
    graph = OperatorGraph(
        name=_MODELS.get(model, model),
        operators=tuple(operators),
        values=tuple(values),
        resident=Resident(parameters=fixed[0]),
        device="p100",
    )
    return Profile(
        graph=graph,
        device="p100",
        kind=ProfileKind.MEASURED,
        costs=tuple(costs),
        environment={"device": "Tesla P100 16 GB"},
    )


def _is_intermediate(node: StandIn) -> bool:
    return type(node).__name__ == "IntNode"


def _offered(
    info: StandIn, node: StandIn, index: int, loss: int, sizes: list[int], rounded: Callable[[float], int]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Cost]]:
    """The implementations of a node: name, reads, overwrites, cost."""
    options = [_nodes(item, "args", len(sizes)) for item in node["args"][:MAX_OPTIONS]]
    costs = _costs(node, "", rounded)
    if index in info.get("conv_list", {}):
        return [
            (f"algorithm{number}", options[0], (), cost) for number, cost in enumerate(costs) if cost is not None
        ]
    if index > loss:
        return [
            (f"option{number}", reads, (), cost)
            for number, (reads, cost) in enumerate(zip(options, costs, strict=False))
            if cost is not None
        ]
    first, again = costs[0], _costs(node, "recompute_", rounded)[0]
    if first is None or again is None:
        return []
    default = replace(first, recompute_latency_ms=again.latency_ms, recompute_workspace_bytes=again.workspace_bytes)
    offered: list[tuple[str, tuple[int, ...], tuple[int, ...], Cost]] = [("default", options[0], (), default)]
    over, in_place = info.get("inplace_list", {}).get(index), _costs(node, "inplace_", rounded)[0]
    if isinstance(over, int) and 0 <= over < index and in_place is not None:
        # The file's workspace is less what is overwritten. A packed intermediate is made beside an operator that
        # overwrites, and overwrites nothing itself.
        cost = replace(in_place, workspace_bytes=in_place.workspace_bytes + sizes[over])
        offered.append(("inplace", options[0], () if _is_intermediate(node) else (over,), cost))
    return offered


def _costs(node: StandIn, prefix: str, rounded: Callable[[float], int]) -> list[Cost | None]:
    """The costs of a node's options; None for those that failed. The solver counts in 0.01 ms and KiB."""
    times = node.get(f"{prefix}workspace_compute") or node["workspace_compute"]
    spaces = node.get(f"{prefix}workspace_mem") or node["workspace_mem"]
    times, spaces = ([as_number(item, "a cost") for item in each[:MAX_OPTIONS]] for each in (times, spaces))
    if not times or len(spaces) < len(times):
        raise ScheduleFileError(f"{type(node).__name__} has {len(times)} times and {len(spaces)} workspaces")
    return [
        None
        if time <= -1000
        else Cost(latency_ms=rounded(time * 100) * MS_PER_UNIT, workspace_bytes=math.ceil(space * 1024) * 1024)
        for time, space in zip(times, spaces, strict=False)
    ]


def _steps(graph: OperatorGraph, info: StandIn, solution: StandIn, loss: int, runs: Any) -> tuple[Step, ...]:
    """The steps that a solution spells out, stage by stage."""
    options, algorithms, in_place = (
        None if solution.get(name) is None else as_array(solution[name]) > 0.5 for name in ("m", "rf", "ip")
    )
    convolutions = info.get("conv_list", {})
    if runs.sum() > MAX_STEPS:
        raise ScheduleFileError(f"r has {runs.sum()} steps, and no solution has more than {MAX_STEPS}")

    def chosen(stage: int, index: int) -> int:
        """The implementation that a node runs with: the first one that is marked, or else its first one."""
        names = []
        if index in convolutions and algorithms is not None:
            marked = algorithms[stage, convolutions[index]]
            names = [f"algorithm{number}" for number in np.flatnonzero(marked)]
        elif index > loss and options is not None and index not in convolutions:
            names = [f"option{number}" for number in np.flatnonzero(options[index - loss])]
        elif index < loss and in_place is not None and in_place[stage, index]:
            names = ["inplace"]
        offered = [item.name for item in graph.operators[index].implementations]
        return next((offered.index(name) for name in names if name in offered), 0)

    steps: list[Step] = []
    loss_stage = int(np.argmax(runs[:, loss]))
    for stage in range(runs.shape[0]):
        # The loss takes no time and runs in many stages: once is enough.
        nodes = [int(index) for index in np.flatnonzero(runs[stage]) if index != loss or stage == loss_stage]
        if runs.shape[1] == loss + 1 and stage:
            nodes.append(loss + stage)
        steps += [(index, chosen(stage, index)) for index in nodes]
    return tuple(steps)


def _nodes(items: Any, name: str, count: int) -> tuple[int, ...]:
    """Numbers of nodes, without repetition."""
    few = isinstance(items, (list, tuple)) and len(items) <= MAX_READS
    if not few or not all(isinstance(item, int) and 0 <= item < count for item in items):
        raise ScheduleFileError(f"{name} is {shown(items)}, which are no nodes")
    return tuple(dict.fromkeys(items))


def _whole(node: StandIn, name: str) -> int:
    return max(0, int(as_number(node[name], name)))


def _text(value: Any, name: str) -> str:
    value = value.decode("latin1") if isinstance(value, bytes) else value
    if not isinstance(value, str) or not value.isprintable():
        raise ScheduleFileError(f"{name} is {shown(value)}, which is no name")
    return value[:80]
