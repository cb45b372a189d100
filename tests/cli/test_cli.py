"""The command as a person runs it: what it prints, writes and exits with."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from commands import run

import monetlite
from monetlite import cli
from monetlite.core.schedule import Status
from monetlite.reporting.text_solve import smallest_budget

pytestmark = pytest.mark.usefixtures("traced_once")

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4),
    )
    return model, (torch.randn(4, 3, 16, 16),)

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), (torch.randn(4, 3, 16, 16),)

def data_dependent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y * 2 if y.sum() > 0 else y

    return Net(), (torch.randn(2, 4),)

def broken():
    raise ZeroDivisionError("no model today")

def leaving():
    raise SystemExit(0)
"""


@pytest.fixture
def folder(work_folder):
    """A person's folder, with a model file and nothing else."""
    (work_folder / "net.py").write_text(MODEL)
    return work_folder


SOLVE = ("solve", "--model", "net.py:build", "--device", "p100", "--time-limit", "0.5")


def test_solve_writes_a_schedule_and_says_what_people_decide_by(folder):
    result = run(*SOLVE, "--budget", "95%", "--output", "s.yaml")
    assert result.exit_code == 0, result.output
    schedule = monetlite.load_schedule("s.yaml")
    assert schedule.device == "p100"
    assert schedule.kind == "estimated"
    assert schedule.peak_bytes <= schedule.budget_bytes
    assert schedule.budget_bytes == int(0.95 * schedule.plain_peak_bytes)
    for heading in (
        "graph",
        "costs",
        "plain training",
        "schedule",
        "overhead",
        "bound",
        "smallest budget",
        "written",
    ):
        assert heading in result.stdout
    assert "estimated for p100" in result.stdout
    assert sorted(os.listdir(folder)) == ["net.py", "s.yaml"]


def test_a_budget_close_to_the_smallest_is_told_of(folder):
    result = run(*SOLVE, "--budget", "95%", "--output", "s.yaml")
    schedule = monetlite.load_schedule("s.yaml")
    more = "a little more memory"
    assert more not in result.stdout
    near = {"smallest_reached_bytes": schedule.budget_bytes, "smallest_proven_bytes": 1}
    slow = replace(schedule, latency_ms=3 * schedule.plain_latency_ms, **near)
    assert more in smallest_budget(slow)
    assert more not in smallest_budget(replace(slow, budget_bytes=2 * slow.budget_bytes))
    assert more not in smallest_budget(replace(schedule, **near))


def test_solve_as_json_is_one_object_and_agrees_with_the_file(folder):
    result = run(*SOLVE, "--budget", "100%", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    schedule = monetlite.load_schedule(facts["output"])
    assert facts["peak_bytes"] == schedule.peak_bytes <= facts["budget_bytes"]
    assert facts["latency_ms"] == pytest.approx(schedule.latency_ms)
    assert facts["lower_bound_ms"] <= facts["latency_ms"]
    assert facts["status"] in (Status.OPTIMAL, Status.FEASIBLE)
    assert facts["costs"] == "estimated"
    assert facts["fingerprint"] == schedule.fingerprint


@pytest.mark.thorough
def test_solve_a_built_in_model_with_an_optimizer(folder):
    shape = ("--model", "resnet18", "--batch", "2", "--input-size", "32")
    without = run("solve", *shape, "--device", "p100", "--time-limit", "0.2", "--budget", "1GB", "--json")
    with_adam = run(
        "solve",
        *shape,
        "--device",
        "p100",
        "--time-limit",
        "0.2",
        "--budget",
        "1GB",
        "--json",
        "--optimizer",
        "adam",
    )
    assert (without.exit_code, with_adam.exit_code) == (0, 0), without.output + with_adam.output
    added = json.loads(with_adam.stdout)["plain_peak_bytes"] - json.loads(without.stdout)["plain_peak_bytes"]
    weights = 11_689_512 * 4
    assert 2 * weights <= added <= 3.05 * weights
    assert json.loads(without.stdout)["output"] == "resnet18_2x32x32_1GB_p100.yaml"


@pytest.mark.thorough
def test_accumulated_gradients_are_counted(folder):
    shape = ("--model", "resnet18", "--batch", "2", "--input-size", "32", "--device", "p100", "--time-limit", "0.2")
    without, counted = (
        json.loads(run("solve", *shape, "--budget", "1GB", "--json", *more).stdout)
        for more in ((), ("--accumulate",))
    )
    assert counted["accumulate"]
    weights = 11_689_512 * 4
    assert 0 < counted["plain_peak_bytes"] - without["plain_peak_bytes"] <= weights
    result = run("solve", *shape, "--budget", "1GB", "--accumulate", "--force")
    assert "gradients of earlier batches" in " ".join(result.stdout.split())


def test_a_step_under_autocast_is_solved_and_verified_there(folder):
    options = ("--device", "cpu", "--time-limit", "1", "--budget", "130%", "--autocast", "bfloat16")
    result = run("solve", "--model", "net.py:build", *options, "--output", "s.yaml")
    assert result.exit_code == 0, result.output
    assert "under autocast to bfloat16" in " ".join(result.stdout.split())
    assert monetlite.load_schedule("s.yaml").autocast == "bfloat16"
    report = run("check", "s.yaml", "--model", "net.py:build", "--json", "--repeats", "1")
    assert report.exit_code == 0, report.output
    assert json.loads(report.stdout)["exact"]


@pytest.mark.parametrize("budget", ["0", "0GB", "-1GB", "abc", "6 XB", "", "1e9", "nan", "9" * 5000 + "GB", "10ZB"])
def test_budgets_that_are_not(budget, folder):
    result = run(*SOLVE, f"--budget={budget}", "--output", "s.yaml")
    assert result.exit_code == 2
    assert "budget" in result.stderr
    assert "6GB" in result.stderr, "the message shows how a budget is written"
    assert "Traceback" not in result.output
    assert os.listdir(folder) == ["net.py"]


def test_a_budget_that_nothing_fits_says_what_would(folder):
    result = run(*SOLVE, "--budget", "100kB", "--output", "s.yaml")
    assert result.exit_code == 3
    assert "100000 bytes" in result.stderr
    assert "every schedule needs at least" in result.stderr
    assert "Raise the budget" in result.stderr
    assert result.stdout == ""
    assert os.listdir(folder) == ["net.py"]
    facts = json.loads(run(*SOLVE, "--budget", "100kB", "--output", "s.yaml", "--json").stdout)
    assert facts["status"] == "infeasible"
    assert facts["budget_bytes"] == 100_000 < facts["smallest_proven_bytes"]
    assert run(*SOLVE, "--budget", f"{facts['smallest_reached_bytes']}B", "--output", "s.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "resnet5000"), "no model is called 'resnet5000'"),
        (("--model", "absent.py:build"), "absent.py"),
        (("--model", "net.py:absent"), "absent"),
        (("--model", "net.py"), "net.py:build"),
        (("--model", "net.py:broken"), "no model today"),
        (("--model", "net.py:build", "--device", "p1000"), "p1000"),
        (("--model", "net.py:build", "--input-size", "0"), "is not an image size"),
        (("--model", "net.py:build", "--batch", "0"), "--batch"),
        (("--model", "net.py:build", "--dtype", "int8"), "--dtype"),
        (("--model", "net.py:build", "--solver", "CPLEX"), "--solver"),
        (("--model", "net.py:build", "--optimizer", "lion"), "--optimizer"),
        (("--model", "net.py:build", "--time-limit", "0"), "--time-limit"),
        (("--model", "net.py:build", "--time-limit", "nan"), "--time-limit"),
        (("--model", "net.py:build", "--output", "."), "--output"),
        (("--model", "net.py:build", "--output", "-"), "'-' is no file's name"),
        (("--model", "net.py:build", "--output", ""), "'' is no file's name"),
        (("--model", "net.py:build", "--batch", "2,3"), "'2,3' is not a valid integer."),
    ],
)
def test_usage_errors(options, says, folder):
    result = run("solve", "--budget", "1GB", *options)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert os.listdir(folder) == ["net.py"]


def test_choices_in_another_case(folder):
    choices = ("--optimizer", "AdamW", "--solver", "scip", "--implementations", "DEFAULT", "--autocast", "BFloat16")
    result = run(*SOLVE, "--budget", "100%", *choices, "--time-limit", "0.5", "--output", "s.yaml")
    assert result.exit_code == 0, result.output
    schedule = monetlite.load_schedule("s.yaml")
    assert (schedule.optimizer, schedule.autocast) == ("adamw", "bfloat16")


def test_a_gpu_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("measure", "--operators", "--model", "net.py:build", "--device", "cuda")
    assert result.exit_code == 2
    assert "no GPU" in result.stderr


def test_a_model_that_cannot_be_captured_names_its_line(folder):
    result = run("solve", "--model", "net.py:data_dependent", "--budget", "1GB", "--device", "p100")
    assert result.exit_code == 4
    line = next(number for number, text in enumerate(MODEL.splitlines(), 1) if "y.sum() > 0" in text)
    assert f"net.py:{line}" in result.stderr
    assert "Traceback" not in result.output


def test_an_output_folder_that_is_not_there_is_noticed_before_solving(folder, monkeypatch):
    monkeypatch.setattr("monetlite.planning.layouts.solve_budget", lambda *_, **__: pytest.fail("solved in vain"))
    result = run(*SOLVE, "--budget", "1GB", "--output", "absent/s.yaml")
    assert result.exit_code == 4
    assert "no folder absent" in result.stderr
    assert os.listdir(folder) == ["net.py"]


def test_a_write_that_fails_leaves_the_old_file(folder, monkeypatch):
    (folder / "s.yaml").write_text("what was there")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    result = run(*SOLVE, "--budget", "100%", "--output", "s.yaml", "--force")
    assert result.exit_code == 4
    assert "No space left on device" in result.stderr
    assert (folder / "s.yaml").read_text() == "what was there"
    assert sorted(os.listdir(folder)) == ["net.py", "s.yaml"]


def test_interrupted_before_anything_was_found(folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("monetlite.planning.layouts.solve_budget", interrupted)
    result = run(*SOLVE, "--budget", "100%", "--output", "s.yaml")
    assert result.exit_code == 4
    assert "interrupted" in result.stderr
    assert os.listdir(folder) == ["net.py"]


def test_a_bug_is_a_message_and_with_debug_a_traceback(folder, monkeypatch):
    def bug(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("monetlite.planning.layouts.solve_budget", bug)
    result = run(*SOLVE, "--budget", "100%")
    assert result.exit_code == 4
    assert "RuntimeError: a bug" in result.stderr
    assert "--debug" in result.stderr
    with pytest.raises(RuntimeError, match="a bug"):
        run(*SOLVE, "--budget", "100%", "--debug")


def test_profile_prints_tables_and_json(folder):
    printed = run("measure", "--operators", "--model", "net.py:build", "--device", "p100", "--top", "3")
    assert printed.exit_code == 0, printed.output
    assert "by family" in printed.stdout
    assert "convolution" in printed.stdout
    result = run("measure", "--operators", "--model", "net.py:build", "--device", "p100", "--json")
    facts = json.loads(result.stdout)
    names = [operator["name"] for operator in facts["operators"]]
    assert names[0] == "0"
    assert "0.backward_weight" in names
    first = facts["operators"][0]
    assert first["writes_bytes"] == 4 * 8 * 16 * 16 * 4
    assert first["implementations"][0]["latency_ms"] > 0
    assert facts["plain_latency_ms"] == pytest.approx(
        sum(item["implementations"][0]["latency_ms"] for item in facts["operators"] if not item["derived"])
    )


def test_verify_by_a_schedule_solved_for_the_same_shapes(folder):
    assert run(*SOLVE, "--budget", "150%", "--output", "s.yaml").exit_code == 0
    result = run("check", "s.yaml", "--model", "net.py:build", "--json", "--repeats", "1")
    facts = json.loads(result.stdout)
    assert facts["largest_difference"] == 0
    assert facts["random_state"] is True
    assert facts["same_shapes"] is True
    assert facts["passed"] == (facts["peak_bytes"] <= facts["budget_bytes"])
    assert result.exit_code == (0 if facts["passed"] else 4)
    printed = run("check", "s.yaml", "--model", "net.py:build", "--repeats", "1")
    assert "bit for bit plain training's" in printed.stdout
    assert printed.stdout.splitlines()[-1].startswith("PASS" if facts["passed"] else "FAIL: the peak")


def test_verify_refuses_other_models_files_and_shapes(folder):
    assert run(*SOLVE, "--budget", "150%", "--output", "s.yaml").exit_code == 0
    text = (folder / "s.yaml").read_text()
    (folder / "cut.yaml").write_text(text[: len(text) // 2])
    (folder / "hostile.yaml").write_text(text.replace("operators:", "operators: !!python/name:os.system #"))
    for arguments, code, says in (
        (("s.yaml", "--model", "net.py:other"), 4, "solved for"),
        (("absent.yaml", "--model", "net.py:build"), 4, "absent.yaml can't be read"),
        (("cut.yaml", "--model", "net.py:build"), 4, "cut.yaml"),
        (("hostile.yaml", "--model", "net.py:build"), 4, "not allowed"),
    ):
        result = run("check", *arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert says in result.stderr, (arguments, result.output)
        assert result.stdout == ""
        assert "Traceback" not in result.output


def test_a_schedule_with_an_optimizer_still_serves_the_model(folder):
    result = run(*SOLVE, "--budget", "150%", "--optimizer", "adam", "--output", "s.yaml")
    assert result.exit_code == 0, result.output
    verified = run("check", "s.yaml", "--model", "net.py:build", "--json", "--repeats", "1")
    assert json.loads(verified.stdout)["largest_difference"] == 0, verified.output


def command(*arguments, cwd):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(monetlite.__file__))]),
    }
    return subprocess.run(
        [sys.executable, "-m", "monetlite", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_module_runs_as_a_command(folder):
    done = command(*SOLVE, "--budget", "100%", "--output", "s.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "s.yaml"
    assert monetlite.load_schedule("s.yaml").name.endswith("net.py:build")
    refused = command("solve", "--model", "net.py:build", "--budget", "much", cwd=folder)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "much" in refused.stderr


def test_what_running_a_shared_schedule_and_showing_results_does_not_import(folder):
    """A person who only trains by a schedule needs torch and YAML: no solver is loaded.

    A search in compiled code takes 70 MB to import, which `monetlite measure` would count.
    """
    code = (
        "import sys, monetlite; monetlite.MONeTWrapper; monetlite.load_schedule; "
        "solvers = ('cvxpy', 'pyscipopt', 'highspy', 'numba', 'rich', 'click'); "
        "print([name for name in solvers if name in sys.modules]); "
        "import monetlite.cli.measure_command, monetlite.reporting.text_measure; "
        "print('numba' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(monetlite.__file__))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "False"], done.stderr


@pytest.mark.thorough
def test_how_exact_and_in_which_layout_is_the_persons_choice(folder):
    result = run(*SOLVE, "--budget", "100%", "--json", "--output", "exact.yaml")
    facts = json.loads(result.stdout)
    assert (facts["tolerance"], facts["layout"]) == (0, "as_traced")
    arguments = ("--budget", "100%", "--tolerance", "1e-4", "--layout", "channels_last", "--output", "loose.yaml")
    result = run(*SOLVE, *arguments, "--json")
    assert result.exit_code == 0, result.output
    loose = json.loads(result.stdout)
    assert (loose["tolerance"], loose["layout"]) == (1e-4, "channels_last")
    assert loose["budget_bytes"] == facts["budget_bytes"], "100% is of plain training in either case"
    schedule = monetlite.load_schedule("loose.yaml")
    assert (schedule.tolerance, schedule.layout) == (1e-4, "channels_last")
    verified = run("check", "loose.yaml", "--model", "net.py:build", "--json", "--repeats", "1")
    assert json.loads(verified.stdout)["largest_difference"] <= 1e-2
    printed = run(*SOLVE, *arguments, "--force")
    assert "images in channels-last" in " ".join(printed.stdout.split())


def test_a_layout_that_changes_nothing_is_told(folder):
    layout = "--tolerance", "1e-4", "--layout", "tiled_loss"
    with pytest.warns(UserWarning, match="layout 'tiled_loss' changes nothing of this model"):
        result = run(*SOLVE, "--budget", "100%", *layout, "--output", "s.yaml")
    assert result.exit_code == 0, result.output
    assert monetlite.load_schedule("s.yaml").layout == "as_traced"


def test_a_layout_that_the_tolerance_rules_out(folder):
    result = run(*SOLVE, "--budget", "100%", "--layout", "channels_last")
    assert result.exit_code == 2
    assert "allow 1e-05 or more" in result.stderr
    assert run(*SOLVE, "--budget", "100%", "--tolerance", "1.5").exit_code == 2


def test_a_model_that_ends_the_process_is_a_failure(folder):
    (folder / "ends.py").write_text("import sys\nbuild = sys.exit(0)\n")
    for model in ("net.py:leaving", "ends.py:build"):
        result = run("solve", "--model", model, "--budget", "90%", "--device", "p100")
        assert result.exit_code == 2
        assert "SystemExit" in result.stderr


@pytest.mark.parametrize("where", ["nowhere/s.yaml", "net.py/s.yaml", "/dev/null", "x" * 300 + ".yaml"])
def test_where_nothing_can_be_written_nothing_is_solved(where, folder, monkeypatch):
    monkeypatch.setattr("monetlite.planning.pipeline.price", lambda *_, **__: pytest.fail("it was priced"))
    result = run(*SOLVE, "--budget", "95%", "--output", where)
    assert result.exit_code == 4
    assert "can't be written" in result.stderr
    assert [path.name for path in folder.iterdir() if path.name.startswith(".x")] == []


OLD = {
    "explain": ("show", "s.yaml --no-solve", 0, "overhead_ms"),
    "plot": ("show", "s.yaml --output t.png --x operators", 0, "kind"),
    "rescale": ("show", "s.yaml --batch 2 --output r.yaml", 0, "from"),
    "verify": ("check", "s.yaml --repeats 1 --no-budget-check", 0, "passed"),
    "profile": ("measure --operators", "--device t4 --output p.json --layout channels_last", 0, "operators"),
    "max-batch": ("solve --max-batch", "--device t4 --budget 1kB --multiple-of 8 --time-limit 1", 3, ""),
}


def test_old_names_are_the_new_commands_and_say_so(folder):
    sized = MODEL.replace("def build():", "def build(batch=4):").replace("randn(4, 3", "randn(batch, 3", 1)
    (folder / "net.py").write_text(sized)
    assert run(*SOLVE, "--budget", "100%", "--output", "s.yaml").exit_code == 0
    listed = run("--help").stdout
    for old, (new, options, code, fact) in OLD.items():
        assert f"  {old} " not in listed
        result = run(old, *options.split(), "--model", "net.py:build", "--json")
        assert result.exit_code == code, (old, result.output)
        assert result.stderr.startswith(f"monetlite: `{old}` is now `monetlite {new}")
        assert not fact or fact in json.loads(result.stdout)
        new_options = {item.name for item in cli.main.commands[new.split()[0]].params}
        assert {item.name for item in cli.main.commands[old].params} - {"batch"} <= new_options
    assert monetlite.load_schedule("r.yaml").peak_bytes < monetlite.load_schedule("s.yaml").peak_bytes
    assert "is now" not in run("show", "s.yaml", "--no-solve", "--model", "net.py:build").stderr


def test_options_of_another_use_are_refused(folder):
    model = ("--model", "net.py:build")
    for arguments, says in (
        (("measure", *model, "--top", "3"), "--top is for measure --operators"),
        (("measure", *model, "--operators", "--warmup", "3"), "--warmup is for measuring without --operators"),
        (("measure", *model, "--operators", "--batch", "1,2"), "--operators is for one --batch"),
        (("measure", *model, "--device", "t4"), "neither cpu nor cuda"),
        (("measure", *model, "--mode", "inference", "--optimizer", "adamw"), "--optimizer is for --mode training"),
        (
            ("solve", *model, "--budget", "1GB", "--max-batch", "--output", "s.yaml"),
            "--output is for solve without",
        ),
        (("solve", *model, "--budget", "1GB", "--multiple-of", "2"), "--multiple-of is for solve --max-batch"),
        (("show", "s.yaml", "--csv", "t.csv"), "--csv is for pictures"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert says in " ".join(result.stderr.split())
    assert os.listdir(folder) == ["net.py"]


def test_rare_options_stand_apart():
    usual, _, rare = run("solve", "--help").stdout.partition("Rare options:")
    assert "--budget" in usual
    for option in ("--solver", "--profile", "--seed", "--layout"):
        assert f"  {option} " not in usual
        assert f"  {option} " in rare


def test_the_line_about_a_model_is_as_wide_as_the_terminal(folder):
    options = ("--model", "vgg11", "--batch", "2", "--input-size", "32", "--device", "p100")
    shown = run("measure", "--operators", *options, columns=40)
    assert shown.exit_code == 0, shown.output
    first = shown.stdout.partition("loss is")[0].splitlines()
    assert first[0].startswith("VGG-11: ")
    assert max(map(len, first)) <= 40
