"""HTML reports as files: what they say, how large they are, and that nothing gets in or out, whatever names are."""

import json
import random
import re
from dataclasses import replace

import pytest
from browsers import Page
from random_graphs import random_profile
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from step_lists import drop_once, schedule_of

from monetlite.core.errors import ScheduleFileError
from monetlite.core.graph import Phase
from monetlite.core.step_analysis import Holding
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import analyse
from monetlite.reporting.html import write_report
from monetlite.solving.baselines import sqrt_checkpointing

HOSTILE = (
    "</script><script>document.title = 'hacked'</script>"
    "<img src=x onerror=\"document.title = 'hacked'\"> <!-- <script> \"'`&amp; ${title} $title naïve 层 \u2028"
)


def test_the_header_has_the_figures_that_people_decide_by(page, resnet, runs):
    header = page.text("header")
    plain, scheduled = runs["plain"].timeline, runs["scheduled"].timeline
    for said in (
        "resnet50, batch 184, within 6 GB",
        format_bytes(scheduled.peak_bytes),
        f"of plain training's {format_bytes(plain.peak_bytes)}",
        f"{resnet.schedule.overhead:+.1%} over plain training's {format_ms(plain.latency_ms)}, estimated for p100",
        f"{resnet.schedule.gap:.1%}",
        f"faster than {format_ms(resnet.schedule.lower_bound_ms)}",
        f"Solved in {resnet.schedule.seconds:.1f} s by {resnet.schedule.solver}: {resnet.schedule.status}.",
    ):
        assert said in header, said


def test_nothing_is_requested_and_nothing_else_can_run(browser, resnet_file):
    browser.get_log("browser"), browser.get_log("performance")
    page = Page(browser, resnet_file)
    page.hover("scheduled", 0.5)
    page.press("Zoom in")
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [
        event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
    ]
    assert requested == [resnet_file.as_uri()]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == [], "no errors, no warnings, no violations of its own policy"
    blocked = browser.execute_async_script(
        """
        const [done] = arguments, found = [];
        addEventListener("securitypolicyviolation", (event) => {
          if (found.push(event.effectiveDirective) === 3) done(found.sort());
        });
        const add = (tag, what) => document.body.append(Object.assign(document.createElement(tag), what));
        add("script", {textContent: "document.title = 'ran'"});
        add("img", {src: "https://example.com/a.png"});
        fetch("https://example.com/").catch(() => {});
        """
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem"]
    assert browser.title != "ran"


def test_it_is_small_and_its_bytes_are_always_the_same(resnet, resnet_file, tmp_path):
    assert resnet_file.stat().st_size < 1_000_000
    again = tmp_path / "again.html"
    write_report(again, analyse(resnet.schedule, resnet.profile, resnet.plain))
    assert again.read_bytes() == resnet_file.read_bytes()


def test_without_scripts_the_figures_at_the_peak_are_there(browser, resnet_file, runs):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(resnet_file.as_uri())
        shown = browser.find_element(By.TAG_NAME, "noscript").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for breakdown in runs.values():
        for holding in Holding:
            assert format_bytes(breakdown.bytes_of[holding][breakdown.timeline.peak_step]) in shown


@pytest.mark.parametrize("width", [400, 2500])
def test_nothing_runs_out_of_the_page(page, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.settle()
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert 0.5 * min(width, 2080) < page.plot("scheduled").rect["width"] < width
        assert page.axis("scheduled")[1] <= page.plot("scheduled").rect["width"]
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_are_text_whatever_they_contain(browser, synthetic, tmp_path):
    profile = synthetic(1)
    graph = profile.graph
    hostile = replace(
        graph,
        name=f"{HOSTILE}\ud800",
        operators=tuple(
            replace(operator, name=f"{HOSTILE}{number}", module=HOSTILE, source=f"/home/someone/{HOSTILE}:{number}")
            for number, operator in enumerate(graph.operators)
        ),
        values=tuple(replace(value, name=f"{HOSTILE}v{number}") for number, value in enumerate(graph.values)),
    )
    profile = replace(profile, graph=hostile)
    path = tmp_path / "hostile & strange.html"
    write_report(path, analyse(schedule_of(profile, drop_once(hostile, range(0, 40, 3))), profile, profile))
    browser.get_log("browser")
    page = Page(browser, path)
    page.plot("scheduled").send_keys(Keys.HOME)
    page.settle()
    panel = page.panel()
    assert panel["name"] == f"{HOSTILE}0"
    assert panel["facts"]["Module"] == HOSTILE
    assert "someone" not in panel["facts"]["Source"], "nobody's folders are in a file that is shared"
    assert panel["tensors"][0][0] == f"{HOSTILE}v0"
    assert page.text("h1").startswith(HOSTILE)
    assert page.text("#values tbody .name").startswith(HOSTILE)
    page.find("#query").send_keys("onerror")
    assert page.texts("#matches .name")[0] == f"{HOSTILE}0"
    assert browser.get_log("browser") == []
    assert browser.title.startswith("</script>")
    assert browser.execute_script("return document.images.length + document.scripts.length") == 2


def test_five_thousand_operators_are_painted_within_two_seconds(browser, synthetic, tmp_path):
    profile = synthetic(139)
    assert len(profile.graph.operators) >= 5000
    path = tmp_path / "large.html"
    write_report(path, analyse(schedule_of(profile, sqrt_checkpointing(profile)), profile, profile))
    paints = []
    for _ in range(3):
        page = Page(browser, path)
        page.settle()
        paints += browser.execute_script(
            "return performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)"
        )
    assert page.band("scheduled", "stored")
    assert len(paints) == 3
    assert min(paints) < 2000


def test_plain_training_with_its_images_laid_out_otherwise(resnet, runs, tmp_path):
    """The two runs of a page need not be of one graph."""
    plain = replace(resnet.plain, graph=replace(resnet.plain.graph, layout="channels_last"))
    operators = tuple(
        replace(operator, module=f"as traced {operator.module}") for operator in plain.graph.operators
    )
    plain = replace(plain, graph=replace(plain.graph, operators=operators))
    path = tmp_path / "layouts.html"
    write_report(path, analyse(resnet.schedule, resnet.profile, plain))
    data = data_of(path)
    modules = {
        run: data["texts"][data["graphs"][data[run]["graph"]]["operators"]["module"][0]]
        for run in ("scheduled", "plain")
    }
    assert modules == {"scheduled": "conv1", "plain": "as traced conv1"}


def test_a_mask_that_is_made_between_the_last_forward_and_the_first_backward_operator_is_stored(tmp_path):
    """The border is at the first backward operator, wherever the last forward operator is."""
    masks = 0
    for seed in range(30):
        profile = random_profile(random.Random(seed))
        graph = profile.graph
        forward = [(index, 0) for index, op in enumerate(graph.operators) if op.phase is Phase.FORWARD]
        forward.sort(key=lambda step: graph.operators[step[0]].optional)
        made = {
            value for index, _ in forward for value in graph.operators[index].writes if value_is_mask(graph, value)
        }
        backward = [
            (index, next((at for at, item in enumerate(op.implementations) if made.intersection(item.reads)), 0))
            for index, op in enumerate(graph.operators)
            if op.phase is Phase.BACKWARD
        ]
        read = {value for index, at in backward for value in graph.operators[index].implementations[at].reads}
        path = tmp_path / f"{seed}.html"
        write_report(path, analyse(schedule_of(profile, [*forward, *backward]), profile, profile))
        data = data_of(path)
        for mask in made & read:
            masks += 1
            assert data["texts"][data["fates"][mask]] == "stored"
    assert masks > 5


def value_is_mask(graph, value):
    return graph.operators[graph.writer[value]].optional


def data_of(path):
    """The figures that a page's script draws."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)[1])


def test_a_file_that_cannot_be_written_leaves_nothing_behind(resnet, tmp_path):
    with pytest.raises(ScheduleFileError, match="no-such-folder"):
        write_report(tmp_path / "no-such-folder" / "r.html", analyse(resnet.schedule, resnet.profile, resnet.plain))
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "monetlite-cache"])
