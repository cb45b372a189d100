"""Models that TorchDynamo takes apart: plain training's steps, by one plan for all pieces."""

import contextlib
import copy
import itertools
import re
import warnings

import pytest
import small_models
import torch
from models_in_pieces import QUICK, ChangesInPlace, DropsLayers, ReadsAMean, Recurrent, mlp, trained
from small_models import Reads, assert_same, step, twin
from step_lists import schedule_of
from thoroughness import often
from torch import nn
from torch._dynamo import graph_break

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import IllegalSchedule, InfeasibleBudget, TraceError
from monetlite.core.steps import check_legal, plain_steps
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals.torch_dynamo import MAX_PIECES
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.runtime import pieces, pieces_planning
from monetlite.runtime.pieces_planning import PiecesPlanning

MODELS = {
    "reads a mean": (ReadsAMean, lambda: (torch.randn(64, 16),)),
    "drops layers": (DropsLayers, lambda: (torch.randn(8, 12, 16),)),
    "recurrent": (Recurrent, lambda: (torch.randint(0, 11, (8, 12)),)),
    "changes in place": (ChangesInPlace, lambda: (torch.randn(64, 16),)),
}


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize("name", often(MODELS, "drops layers", "recurrent"))
def test_steps_in_pieces_are_plain_training_s(name):
    build, inputs = MODELS[name]
    plain, args = build(), inputs()
    model = monetlite.within(twin(plain), budget="105%", **QUICK)
    for seed in range(6):
        assert_same(step(model, args, seed), step(plain, args, seed))
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes
    smaller = tuple(item[:5] for item in args)
    assert_same(step(model, smaller), step(plain, smaller))


def test_what_separates_the_pieces_is_told_once_and_whole_refuses():
    model, x = Reads(), torch.randn(64, 64)
    refusing = monetlite.within(copy.deepcopy(model), budget="100%", whole=True, **QUICK)
    with pytest.raises(TraceError, match=r"item\(\)"):
        refusing(x)
    monetlite.within(model, budget="100%", layout="channels_last", tolerance=1e-5, **QUICK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            model(x).sum().backward()
    (said,) = (str(item.message) for item in told if "can't be captured whole" in str(item.message))
    assert "It trains in 2 pieces" in said
    assert "Layouts and compile=True are of whole models only" in said
    assert re.search(r"\d+% of the step's time planned", said)
    assert f"{small_models.__file__}:" in said
    assert ".item()" in said
    plan = monetlite.schedule_of(model)
    monetlite.release(model)
    monetlite.within(model, budget=plan.peak_bytes // 2, **QUICK)
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(InfeasibleBudget):
        model(x)


def test_time_of_captures_is_not_taken_for_that_of_code_between_the_pieces():
    """The second step captures the pieces once more, for any size."""
    model = monetlite.within(Reads(), budget="100%", **QUICK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (64, 60, 60):
            model(torch.randn(rows, 64)).sum().backward()
    (said,) = (str(item.message) for item in told if "can't be captured whole" in str(item.message))
    assert "It trains in 2 pieces; " in said
    assert monetlite.schedule_of(model).plain_latency_ms < 100


class AsksForAGradient(nn.Module):
    """Asks for a gradient of its first piece in the forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(64), mlp(64)

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        y = self.first(x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return self.second(y + slope.detach())


class Gated(nn.Module):
    """A GRU between two pieces, whose output is gone when the forward pass ends; and a mean of convolutions."""

    def __init__(self):
        super().__init__()
        self.before, self.gru, self.after = nn.Embedding(40, 64), nn.GRU(64, 64, batch_first=True), mlp(64)

    def forward(self, tokens):
        hidden, _ = self.gru(self.before(tokens))
        return self.after(hidden).sum(1)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Conv2d(16, 8, 3)

    def forward(self, x):
        x = self.first(x)
        if x.max() > 1e6:
            x = x / 2
        return self.second(x).relu().mean((2, 3)), x


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (AsksForAGradient, lambda: torch.randn(512, 64)),
        (Gated, lambda: torch.randint(0, 40, (16, 64))),
        (Pools, lambda: torch.randn(8, 3, 48, 48)),
    ],
)
def test_the_peak_of_a_final_plan_is_that_of_a_step_by_it(build, inputs):
    """Code between pieces takes what it takes by that plan; outputs live as long as somebody holds them."""
    model, args = build(), (inputs(),)
    plain_bytes = Trainee(copy.deepcopy(model), args, {}, default_loss, "cpu").memory().peak_bytes
    wrapper = monetlite.MONeTWrapper(model, budget=int(1.05 * plain_bytes), wait=True, time_limit=0.3)
    trainee = Trainee(wrapper, args, {}, default_loss, "cpu")
    for _ in range(6):
        trainee.step()
    assert trainee.memory().peak_bytes == pytest.approx(wrapper.schedule.peak_bytes, rel=0.01)


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.thorough
def test_a_plan_holds_the_budget_and_is_predicted_within_three_percent():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(128), mlp(128)

        def forward(self, x):
            x = self.first(x)
            graph_break()
            return self.second(x)

    model, args = Wide(), (torch.randn(2048, 128),)
    plain_bytes = Trainee(copy.deepcopy(model), args, {}, default_loss, "cpu").memory().peak_bytes
    budget = int(0.9 * plain_bytes)
    wrapper = monetlite.MONeTWrapper(model, budget=budget, wait=True, time_limit=1.0)
    trainee = Trainee(wrapper, args, {}, default_loss, "cpu")
    for _ in range(3):
        trainee.step()
    measured = trainee.memory().peak_bytes
    assert measured <= budget
    assert abs(wrapper.schedule.peak_bytes / measured - 1) < 0.03


class Loops(nn.Module):
    """A kernel that TorchDynamo leaves alone, in the loop over the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        for layer in self.layers:
            x = own_kernel(torch.tanh(layer(x)), self.weight) + x
        return x


@torch.compiler.disable
def own_kernel(x, weight):
    return x * weight


class Clips(nn.Module):
    def forward(self, x):
        largest = x.abs().max().item()
        return x / largest if largest > 50 else x


def layers(count, width=16):
    return [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())]


def sequential():
    return nn.Sequential(*layers(3), Clips(), *layers(3), nn.Linear(16, 16))


def nested():
    return nn.Sequential(nn.Sequential(*layers(3)), nn.Sequential(Clips(), *layers(3)), nn.Linear(16, 16))


def hooked():
    model = nn.Sequential(nn.Sequential(*layers(3)), nn.Sequential(*layers(3)))
    model[1].register_forward_hook(logged)
    return model


def logged(module, inputs, output):
    assert output.mean().item() < 1e9


class Masked(nn.Module):
    """PyTorch's own encoder with a causal mask, which it compares with one of its own."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize(
    ("build", "skipped"),
    often(itertools.product([sequential, nested, hooked, Masked], [False, True]), (sequential, False)),
)
def test_torch_s_own_modules_are_taken_apart_and_planned(build, skipped):
    """TorchDynamo leaves out their functions, and notes that, where a part of them breaks a graph."""
    x = torch.randn(*((32, 9) if build is Masked else (256,)), 16)
    if skipped:
        torch.compile(build(), backend="eager")(x)
    plain = build()
    model = monetlite.within(twin(plain), budget="85%", **QUICK)
    for seed in range(5):
        assert_same(step(model, (x,), seed), step(plain, (x,), seed))
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes


class HasSparseGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 16, sparse=True), mlp()
        self.bag = nn.EmbeddingBag(11, 16, mode="sum", sparse=True)

    def forward(self, tokens):
        return self.body(self.embed(tokens)) + self.bag(tokens)[:, None]


class DrawsFromAGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.own = [torch.Generator().manual_seed(3)]

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) + torch.randn(x.shape, generator=self.own[0]))


class Observed(torch.autograd.Function):
    """Notes the largest gradient in a buffer."""

    @staticmethod
    def forward(ctx, x, largest):
        ctx.largest = largest
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.largest.copy_(gradient.abs().max().maximum(ctx.largest))
        return gradient, None


class ObservesGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Hidden(), Hidden())
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        return Observed.apply(self.body(x), self.largest)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x).tanh()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.second(torch.cond(x.sum() > 0, torch.sin, torch.cos, (h,)))


class MayObserve(nn.Module):
    def __init__(self, observes):
        super().__init__()
        self.first, self.second, self.observes = nn.Linear(16, 64), nn.Linear(64, 16), observes
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        y = x + self.second(torch.tanh(self.first(x)).sin())
        return Observed.apply(y, self.largest) if self.observes else y


def one_of_many():
    """Blocks of one class with breaks between them, of which one can't be planned."""
    return nn.Sequential(*(item for at in range(6) for item in (MayObserve(at == 1), Clips())))


def several():
    return nn.Sequential(ObservesGradients(), ObservesGradients())


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize("build", [ObservesGradients, Branches, several, one_of_many])
def test_what_surrounds_a_part_that_can_not_be_planned_is_planned(build):
    plain = build()
    budget = {one_of_many: "60%", several: "120%"}.get(build, "95%")
    model = monetlite.within(twin(plain), budget=budget, **QUICK)
    for seed in range(5):
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(seed))
        assert_same(step(model, (x,), seed), step(plain, (x,), seed))
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes
    graphs = []
    torch.compile(Hidden(), backend=lambda graph, _: graphs.append(graph) or graph)(x)
    torch.compile(build(), backend=lambda graph, _: graphs.append(graph) or graph)(x)
    assert len(graphs) >= 2, "others capture its functions as ever"


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize("build", [Loops, HasSparseGradients, DrawsFromAGenerator])
def test_what_is_left_alone_keeps_its_gradients(build):
    torch.manual_seed(0)
    plain, model = build(), build()
    model.load_state_dict(plain.state_dict())
    monetlite.within(model, budget="105%", **QUICK)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(8, 16) if build is not HasSparseGradients else torch.randint(0, 11, (8, 12))
        for owner in (plain, model):
            owner.zero_grad()
            torch.manual_seed(seed)
            owner(x).square().sum().backward()
        for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert ours.grad.layout == theirs.grad.layout, name
            assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense()), name
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes


class CapturesNothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return torch.compiler.disable(lambda: own_kernel(self.layer(x), 2.0))()


def test_a_model_that_can_not_be_planned_trains_plainly_where_it_fits():
    plain, x = CapturesNothing(), torch.randn(64, 16)
    model = monetlite.within(twin(plain), budget="1MB", **QUICK)
    for _ in range(2):
        assert_same(step(model, (x,)), step(plain, (x,)))
    with pytest.warns(UserWarning, match="None of it can be planned, so it trains as it is, and a step takes"):
        third = step(model, (x,))
    assert_same(third, step(plain, (x,)))
    large = torch.randn(64_000, 16)
    step(model, (large,))  # which is measured
    with pytest.raises(TraceError, match=r"of the budget of 1 MB: raise the budget"):
        step(model, (large,))
    model = monetlite.within(twin(plain), budget="20kB", **QUICK)
    for _ in range(2):
        step(model, (x,))
    with pytest.raises(TraceError, match=r"of the budget of 20 kB: raise the budget"):
        step(model, (x,))


@pytest.mark.filterwarnings("ignore:Recurrent")
def test_passes_without_a_backward_pass_are_not_refused():
    model, x = monetlite.within(CapturesNothing(), budget="50%", **QUICK), torch.randn(64, 16)
    for _ in range(8):
        model(x)
    step(model, (x,))
    with pytest.raises(TraceError, match=r"of the budget of .* \(50% of that\): raise the budget"):
        model(x)
    model, x = monetlite.within(Recurrent(), budget="1GB", **QUICK), torch.randint(0, 11, (8, 12))
    for _ in range(8):
        model(x)
    trained(model, x)
    assert monetlite.schedule_of(model) is not None  # it is planned once there is a backward pass


class MayBeCaptured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        self.captured = True

    def forward(self, x):
        return self.layers(x) if self.captured else torch.compiler.disable(lambda: self.layers(x))()


@pytest.mark.parametrize(("nothing", "said"), [(False, "It trains in 1 piece"), (True, "None of it can be")])
def test_a_share_is_not_less_than_an_earlier_plan_s(nothing, said):
    """Plain training of the last layer alone takes little, and no plan in pieces takes a share of that."""
    model, x = MayBeCaptured(), torch.randn(512, 64)
    plain = twin(model)
    monetlite.within(model, budget="90%", **QUICK)
    assert_same(step(model, (x,)), step(plain, (x,)))
    before_bytes = monetlite.schedule_of(model).budget_bytes
    for owner in (model, plain):
        owner.layers[:-1].requires_grad_(False)
        owner.layers[2].momentum = None  # which can't be captured
    model.captured = not nothing
    for _ in range(2):
        assert_same(step(model, (x,)), step(plain, (x,)))
    with pytest.warns(UserWarning, match=said):
        third = step(model, (x,))
    assert_same(third, step(plain, (x,)))
    assert nothing or monetlite.schedule_of(model).budget_bytes == before_bytes


@pytest.mark.thorough
def test_a_larger_budget_can_be_tried_where_an_error_is_handled():
    """The error that is handled is the context of others; they are not taken for it."""
    model, x = Recurrent(), torch.randint(0, 11, (8, 12))
    with pytest.raises(InfeasibleBudget):
        trained(monetlite.within(model, budget="50%", **QUICK), x)
    monetlite.release(model)
    try:
        raise InfeasibleBudget("handled", budget_bytes=1, proven_bytes=2, reached_bytes=2)
    except InfeasibleBudget:
        trained(monetlite.within(model, budget="1GB", **QUICK), x)
    assert monetlite.schedule_of(model).budget_bytes == 10**9


def test_pieces_may_have_many_programs_of_one_function(monkeypatch):
    """Models of one class have it in common, and TorchDynamo keeps the programs of those that are gone."""
    limits, captured_piece = [], pieces.CapturedPiece

    def noted(*arguments):
        limits.append(torch._dynamo.config.recompile_limit)
        return captured_piece(*arguments)

    monkeypatch.setattr(pieces, "CapturedPiece", noted)
    step(monetlite.within(AddsLaidOutOtherwise(), budget="1GB", time_limit=0.3), (torch.randn(16, 8, 32),))
    assert limits == [MAX_PIECES] * 3


class MeanTeacher(nn.Module):
    """Learns from a frozen copy, which follows it after a break in the same forward pass."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        loss = (self.student(x) - target).pow(2).mean()
        with torch.no_grad():
            kept = 0.9 if self.seen > 0 else 0.0
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(other, 1 - kept)
            self.seen += 1
        return loss


def test_frozen_weights_that_follow_others_in_the_forward_pass():
    plain, x = MeanTeacher(), torch.randn(64, 16)
    planned = monetlite.within(twin(plain), budget="1GB", time_limit=0.3)
    for _ in range(4):
        assert_same(step(planned, (x,)), step(plain, (x,)), within=1e-6)
    assert torch.equal(planned.teacher.weight, plain.teacher.weight)


class ChangesAView(nn.Module):
    """A piece is given a tensor and a view of it, and changes the view."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        made = self.first(x)
        row = made[:, 0]
        torch._dynamo.graph_break()
        row.add_(1.0)
        return self.last(made).sigmoid()


def test_inputs_of_a_piece_that_share_memory_and_change():
    plain, x = ChangesAView(), torch.randn(8, 16, 16)
    planned = monetlite.within(twin(plain), budget="1GB", time_limit=0.3)
    for _ in range(4):
        assert_same(step(planned, (x,)), step(plain, (x,)), within=1e-6)


class AddsLaidOutOtherwise(nn.Module):
    """Its second piece adds two tensors, over one of which the sum can be written if both lie alike in memory."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(32, 32), nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x):
        y = self.first(x)
        if y.mean() > 1e9:
            return y
        z = nn.functional.silu(torch.sigmoid(x) + self.drop(y))
        return z if z.mean() > 1e9 else self.last(z).square().mean()


class InPlace(PlanningBesideTraining):
    """Plans all operators in place that may run so after the one before, whatever is the fastest here."""

    def first(self, *, settle=True):
        self.finished = True
        profile = self._without_costs()
        steps = list(plain_steps(profile.graph))
        for number, (at, _) in enumerate(steps):
            names = [item.name for item in profile.graph.operators[at].implementations]
            choice = names.index("inplace") if "inplace" in names else 0
            tried = [*steps[:number], (at, choice), *steps[number + 1 :]]
            with contextlib.suppress(IllegalSchedule):
                check_legal(profile.graph, tried)
                steps = tried
        return schedule_of(profile, steps)


def test_inputs_that_are_laid_out_otherwise_are_plain_training_s(monkeypatch):
    monkeypatch.setattr(pieces_planning, "PlanningBesideTraining", InPlace)
    plain = AddsLaidOutOtherwise()
    planned = monetlite.within(twin(plain), budget="100%", device="rtx-3090")
    for number in range(6):
        x = torch.randn(16, 32, 16).transpose(1, 2) if number < 4 else torch.randn(16, 8, 32)
        assert_same(step(planned, (x,)), step(plain, (x,)), within=1e-6)
    assert monetlite.schedule_of(planned).choices.implementations["piece2.add"] == "inplace"


def test_a_plan_that_takes_more_in_pieces_is_made_for_less_by_all_of_that(monkeypatch):
    """Also where it leaves some of its budget unused; and the error names the whole budget if there is none."""
    taken = []

    class FailsWithLess(InPlace):
        def take_off(self, size_bytes):
            taken.append(size_bytes)

        def first(self, *, settle=True):
            if taken:
                raise InfeasibleBudget("nothing fits", budget_bytes=1, proven_bytes=2, reached_bytes=10**6)
            return super().first(settle=settle)

    monkeypatch.setattr(pieces_planning, "PlanningBesideTraining", FailsWithLess)
    monkeypatch.setattr(PiecesPlanning, "_peak_bytes", lambda _, schedule: schedule.peak_bytes + 50_000)
    planned = monetlite.within(AddsLaidOutOtherwise(), budget="102%", device="rtx-3090")
    x = torch.randn(16, 32, 16).transpose(1, 2)
    for _ in range(2):
        step(planned, (x,))
    with pytest.raises(InfeasibleBudget) as caught:
        planned(x)
    assert taken == [50_000]
    budget_bytes, said = caught.value.budget_bytes, str(caught.value)
    assert caught.value.reached_bytes == 10**6 + 50_000
    assert f"take up to 50 kB more than they are solved for, and the budget is {format_bytes(budget_bytes)}" in said
    assert "Raise it to about 1.05 MB (1050000 bytes). Within what is left: nothing fits" in said
