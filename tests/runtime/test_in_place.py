"""`monetlite.within`: the same object, trained by a schedule until it is released."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from small_models import TinyCNN, assert_same, step, twin
from thoroughness import often
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import monetlite

QUICK = {"device": "rtx-3090", "time_limit": 0.3}


def tiny_cnn():
    return TinyCNN(), (torch.randn(4, 3, 12, 12),)


@pytest.fixture(scope="module")
def solved():
    torch.manual_seed(0)
    model, inputs = tiny_cnn()
    return model, inputs, monetlite.optimize(model, inputs, "90%", **QUICK)


def test_the_object_stays_itself_and_trains_as_before(solved):
    original, inputs, schedule = solved
    model = twin(original)
    expected = step(twin(model), inputs)
    before = set(vars(model)), list(model.state_dict()), inspect.signature(model.forward)
    assert monetlite.within(model, schedule) is model
    assert type(model) is TinyCNN
    assert_same(step(model, inputs), expected)
    assert monetlite.schedule_of(model) == schedule
    assert (list(model.state_dict()), inspect.signature(model.forward)) == before[1:]
    assert monetlite.release(model) is model
    assert set(vars(model)) == before[0]


def test_a_step_runs_by_the_schedule_until_it_is_released(solved):
    original, inputs, schedule = solved
    model = twin(original)

    def way():
        return type(model(*inputs).grad_fn).__name__

    plain = way()
    monetlite.within(model, schedule)
    scheduled = way()
    assert scheduled != plain
    with torch.no_grad():
        assert way() == "NoneType"
    assert [(model.train(mode), way())[1] for mode in (False, True)] == [plain, scheduled]
    monetlite.release(model)
    assert way() == plain


def test_a_budget_is_solved_for_at_the_first_step(solved):
    original, inputs, _ = solved
    model = monetlite.within(twin(original), budget="95%", **QUICK)
    assert monetlite.schedule_of(model) is None
    model(*inputs).sum().backward()
    found = monetlite.schedule_of(model)
    assert found.peak_bytes <= found.budget_bytes == int(0.95 * found.plain_peak_bytes)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_plainly(solved, copied):
    original, inputs, schedule = solved
    model = monetlite.within(twin(original), schedule)
    other = copied(model)
    with pytest.raises(monetlite.MonetliteError, match="was not called on this TinyCNN"):
        monetlite.schedule_of(other)
    assert_same(step(other, inputs), step(twin(original), inputs))


def test_a_scheduled_model_is_traced_verified_and_wrapped_as_itself(solved):
    original, inputs, schedule = solved
    model = monetlite.within(twin(original), schedule)
    assert monetlite.trace(model, inputs).fingerprint == schedule.fingerprint
    assert max(monetlite.verify(model, schedule, inputs, repeats=1).gradients.values()) == 0
    assert monetlite.schedule_of(model) == schedule


def test_hooks_of_the_module_run_as_in_plain_training(solved):
    original, inputs, schedule = solved
    seen = []
    model = monetlite.within(twin(original), schedule)
    model(*inputs).sum().backward()
    model.eval()
    model.register_forward_hook(lambda *_: seen.append(1))
    model(*inputs)
    assert seen == [1]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda model, schedule: monetlite.within(model, schedule), r"release\(model\)"),
        (lambda model, schedule: model.compile(backend="eager"), r"model.compile\(\) was called"),
    ],
)
def test_a_module_that_is_called_otherwise_already_is_refused(solved, prepare, says):
    original, _, schedule = solved
    model = twin(original)
    prepare(model, schedule)
    with pytest.raises(monetlite.MonetliteError, match=says):
        monetlite.within(model, schedule)


def test_mistakes_are_named(solved):
    original, _, schedule = solved
    model = twin(original)
    for call, says in (
        (lambda: monetlite.within(model), "give a schedule, or a budget"),
        (lambda: monetlite.within(model, "6GB"), "give a budget by its name: budget='6GB'"),
        (lambda: monetlite.within(model, 6 * 10**9), "give a budget by its name: budget=6000000000"),
        (lambda: monetlite.within(model, schedule, seed=1), "'seed' is an option of solving"),
        (lambda: monetlite.within(model, budget="6GB", sede=1), "no option 'sede'"),
        (lambda: monetlite.within(monetlite.MONeTWrapper(model, schedule), schedule), "is wrapped already"),
        (lambda: monetlite.release(model), "was not called on this TinyCNN$"),
    ):
        with pytest.raises(monetlite.MonetliteError, match=says):
            call()
    assert isinstance(model, nn.Module)
    model(torch.randn(4, 3, 12, 12)).sum().backward()


def test_a_plan_that_compile_took_off_is_said_to_be_gone(solved):
    original, _, schedule = solved
    model = monetlite.within(twin(original), schedule)
    model.compile(backend="eager")
    with pytest.raises(monetlite.MonetliteError, match=r"or model.compile\(\) took its plan off"):
        monetlite.schedule_of(model)


@pytest.mark.parametrize("made", often([monetlite.within, monetlite.MONeTWrapper], monetlite.within))
def test_a_step_whose_operators_are_watched_is_plain_trainings(made):
    plain, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (torch.randn(4, 8),)
    counts = []
    model = made(twin(plain), budget="100%", device="rtx-4090", time_limit=0.3)
    for trained in (plain, model):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                with FlopCounterMode(display=False) as counter:
                    found = step(trained, inputs)
                counts.append(counter.get_total_flops())
            traced = torch.jit.trace(trained, inputs)
        assert ["FlopCounterMode" in str(item.message) for item in told].count(True) == (trained is model)
        assert torch.equal(traced(*inputs), plain(*inputs))
    assert_same(found, step(plain, inputs))
    assert counts[0] > 0
    assert len(set(counts)) == 1
    assert_same(step(model, inputs), step(plain, inputs))
    assert (model.schedule if made is monetlite.MONeTWrapper else monetlite.schedule_of(model)) is not None


SWITCHED_OFF = {
    "stance": lambda: torch.compiler.set_stance("force_eager"),
    "no second program": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "disabled": lambda: torch._dynamo.config.patch(disable=True),  # TORCH_COMPILE_DISABLE=1
    "no second capture": lambda: torch._dynamo.config.patch(error_on_recompile=True),
}


@pytest.mark.parametrize("how", often(SWITCHED_OFF, "stance", "disabled", "no second capture"))
def test_plans_run_where_torch_compile_is_switched_off(how):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = monetlite.within(twin(plain), budget="100%", device="rtx-4090", time_limit=0.3)
    with SWITCHED_OFF[how]():
        for rows in (4, 6):
            inputs = (torch.randn(rows, 8),)
            assert_same(step(model, inputs), step(plain, inputs))
            assert monetlite.schedule_of(model) is not None
        assert monetlite.trace(twin(plain), inputs).operators
