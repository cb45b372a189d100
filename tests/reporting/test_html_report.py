"""HTML reports in a browser, as a person uses them: what they show is compared with what Python computes."""

import bisect
import io
import re
from itertools import accumulate

import pytest
from browsers import Page
from rich.console import Console
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.color import Color

from monetlite.core.step_analysis import Holding, StepAnalysis
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import analyse
from monetlite.reporting.analysis_alternatives import Around
from monetlite.reporting.html import write_report
from monetlite.reporting.palette import FILLS
from monetlite.reporting.text_explain import explanation_facts, print_explanation
from monetlite.reporting.text_tradeoff import tradeoff_table


def alive(breakdown: StepAnalysis, step: int):
    """The stays that a step's memory counts."""
    return [
        stay
        for stay in breakdown.lifetimes
        if stay.begin <= step and (stay.end > step or (stay.end == step and not stay.overwritten))
    ]


def expected_tensors(graph, breakdown, step):
    """The rows of the panel, in words."""
    steps = breakdown.timeline.steps
    rows = []
    for stay in sorted(alive(breakdown, step), key=lambda stay: -graph.values[stay.value].size_bytes):
        value = graph.values[stay.value]
        later = [at for at in stay.reads if at > step]
        why = ["written here"] if stay.begin == step else []
        if step in stay.reads:
            why.append("read here" if later or value.held else "read here for the last time")
        elif not stay.reads and not value.held:
            why.append("nothing reads it")
        if later:
            reader = graph.operators[steps[later[0]][0]].name
            why.append(f"next read at step {later[0] + 1} by {reader}")
        layout = "×".join(map(str, value.shape)) or "scalar"
        since = f"{layout} {value.dtype}, since step {stay.begin + 1}"
        rows.append((value.name, format_bytes(value.size_bytes), since, "; ".join(why), value.held))
    return rows


def check_panel(panel, graph, breakdown, step):
    timeline = breakdown.timeline
    index, way = timeline.steps[step]
    operator = graph.operators[index]
    assert panel["where"].startswith(f"Step {step + 1} of {len(timeline.steps)}, ")
    assert panel["name"] == operator.name
    assert panel["facts"]["Module"] == (operator.module or "the model itself")
    assert panel["facts"]["Implementation"] == operator.implementations[way].name
    assert panel["facts"]["Latency"] == format_ms(timeline.latencies_ms[step])
    assert panel["facts"]["Workspace"] == format_bytes(timeline.workspace_bytes[step])
    again = index in [earlier for earlier, _ in timeline.steps[:step]]
    assert panel["facts"]["Pass"].startswith("run again") == again
    taken_over = [stay for stay in breakdown.lifetimes if stay.overwritten and stay.end == step]
    names = ", ".join(graph.values[stay.value].name for stay in taken_over)
    assert panel["facts"].get("Overwrites", "") == names
    assert panel["memory"].startswith(f"In memory: {format_bytes(timeline.memory_bytes[step])}, ")
    held = {str(holding): breakdown.bytes_of[holding][step] for holding in Holding}
    assert panel["holdings"] == {holding: format_bytes(size) for holding, size in held.items() if size}
    expected = expected_tensors(graph, breakdown, step)
    assert len(panel["tensors"]) == len(expected)
    for (name, size, since, why), (*facts, reasons, is_held) in zip(panel["tensors"], expected, strict=True):
        assert [name, size, since] == facts
        assert why.startswith(reasons)
        assert (why != reasons) == is_held, (
            "what is held to the end says so beside its reads, and nothing else does"
        )


def test_pointing_at_a_step_shows_its_operator_and_the_tensors_that_are_in_memory(page, resnet, runs):
    graphs = {"scheduled": resnet.profile.graph, "plain": resnet.plain.graph}
    extent_ms = max(sum(breakdown.timeline.latencies_ms) for breakdown in runs.values())
    seen = []
    for run, share in (("scheduled", 0.004), ("scheduled", 0.3), ("scheduled", 0.61), ("plain", 0.42)):
        breakdown = runs[run]
        pointed = page.hover(run, share)
        begins = [0.0, *accumulate(breakdown.timeline.latencies_ms)]
        step = page.step(run)
        # Latencies are rounded to six digits on the page: at an edge, a neighbour is as right.
        place = pointed * extent_ms
        assert (
            bisect.bisect_right(begins, place - 0.01) - 1 <= step <= bisect.bisect_right(begins, place + 0.01) - 1
        )
        check_panel(page.panel(), graphs[run], breakdown, step)
        seen.append((run, step))
    assert len(set(seen)) == 4


@pytest.mark.thorough
def test_keys_go_from_step_to_step(page, resnet, runs):
    breakdown = runs["scheduled"]
    timeline = breakdown.timeline
    plot = page.plot("scheduled")
    ten_right = [Keys.SHIFT, Keys.ARROW_RIGHT, Keys.NULL]
    overwriting = next(stay.end for stay in breakdown.lifetimes if stay.overwritten and stay.end > 20)
    operators = [index for index, _ in timeline.steps]
    again = next(at for at, index in enumerate(operators) if index in operators[:at])
    for keys, step in (
        ([Keys.HOME], 0),
        ([Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT], 1),
        (ten_right, 11),
        ([Keys.END], len(timeline.steps) - 1),
        (["p"], timeline.peak_step),
        *(
            ([Keys.HOME, *ten_right * (step // 10), *[Keys.ARROW_RIGHT] * (step % 10)], step)
            for step in (overwriting, again)
        ),
    ):
        plot.send_keys(*keys)
        page.settle()
        assert page.step("scheduled") == step
        check_panel(page.panel(), resnet.profile.graph, breakdown, step)
        name = resnet.profile.graph.operators[operators[step]].name
        said = f"step {step + 1}, {name}, {format_bytes(timeline.memory_bytes[step])}"
        assert plot.get_attribute("aria-valuetext") == said


def test_a_step_that_is_kept_stays_while_the_pointer_moves_on(page):
    page.hover("scheduled", 0.5)
    step = page.step("scheduled")
    page.plot("scheduled").send_keys(Keys.ENTER)
    page.hover("scheduled", 0.2)
    assert page.panel()["where"].startswith(f"Step {step + 1} of ")
    page.find("#panel .keep").click()
    page.hover("scheduled", 0.2)
    assert page.step("scheduled") < step


def shown_range(page):
    begin, end = re.match(r"([\d.]+)–([\d.]+)", page.range()).groups()
    return float(begin), float(end)


@pytest.mark.thorough
def test_zooming_changes_what_is_shown_and_reset_restores_it(page):
    whole, picture = page.range(), page.band("scheduled", "stored")
    length = shown_range(page)[1]

    def reset():
        page.find("#zoom [data-action=reset]").click()
        page.settle()
        assert page.range() == whole
        assert page.band("scheduled", "stored") == picture

    page.press("Zoom in")
    begin, end = shown_range(page)
    assert end - begin == pytest.approx(length / 2, rel=0.01)
    assert page.band("scheduled", "stored") != picture
    page.press("Move left")
    assert shown_range(page) == pytest.approx((begin - length / 8, end - length / 8), rel=0.02)
    page.press("Zoom out")
    page.press("Zoom out")
    assert page.range() == whole

    plot = page.plot("scheduled")
    ActionChains(page.browser, duration=0).scroll_from_origin(ScrollOrigin.from_element(plot), 0, -300).perform()
    page.settle()
    begin, end = shown_range(page)
    assert end - begin == pytest.approx(0.8 * length, rel=0.01)
    reset()

    ActionChains(page.browser, duration=0).move_to_element(plot).click_and_hold().move_by_offset(
        120, 0
    ).release().perform()
    page.settle()
    begin, end = shown_range(page)
    axis = page.axis("scheduled")
    assert end - begin == pytest.approx(length * 120 / (axis[1] - axis[0]), rel=0.02)
    reset()


def test_across_by_operator_number(page, runs):
    page.find("input[value=step]").click()
    page.settle()
    counts = {run: len(breakdown.timeline.steps) for run, breakdown in runs.items()}
    assert page.range() == f"steps 1–{counts['scheduled']} of {counts['scheduled']}"
    pointed = page.hover("scheduled", 0.75)
    assert page.step("scheduled") == int(pointed * counts["scheduled"])


def test_the_peaks_number_is_that_of_the_text_and_the_facts(page, resnet, runs):
    analysis = analyse(resnet.schedule, resnet.profile, resnet.plain)
    printed = io.StringIO()
    print_explanation(Console(file=printed), analysis, Around())
    timeline = runs["scheduled"].timeline
    said = f"step {timeline.peak_step + 1} of {len(timeline.steps)}"
    assert said in " ".join(printed.getvalue().split())
    assert said in page.text("#chart-scheduled figcaption")
    assert page.panel()["where"].startswith(said.capitalize())
    assert explanation_facts(analysis, Around())["peak"]["step"] == timeline.peak_step + 1


def test_the_page_has_the_curve_and_the_sentences_of_the_text(browser, subject, traded, tmp_path):
    write_report(tmp_path / "traded.html", subject, Around(), traded)
    page = Page(browser, tmp_path / "traded.html")
    found = [item.best for item in traded.budgets if item.best is not None]
    titles = page.texts("#curve .ours title")
    assert len(titles) == len(found) >= 2
    assert all(format_bytes(point.peak_bytes) in title for point, title in zip(found, titles, strict=True))
    assert page.find("#curve svg").rect["width"] > 300
    columns, rows = tradeoff_table(traded)
    assert page.texts("#tradeoff thead th") == columns
    assert page.texts("#tradeoff tbody th") == [row[0] for row in rows]
    printed = io.StringIO()
    print_explanation(Console(file=printed, width=4000), subject, Around())
    told = " ".join(page.text("#explanation").split())
    sentences = [line for line in printed.getvalue().splitlines() if line.strip().endswith(".")]
    assert len(sentences) > 8
    assert all(" ".join(sentence.split()) in told for sentence in sentences)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_those_of_pictures(page, theme):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        for holding, fill in FILLS.items():
            band = page.find(f"#chart-scheduled path[data-holding='{holding}']").value_of_css_property("fill")
            assert Color.from_string(band).hex == fill.colour
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_legend_takes_kinds_out_of_the_picture_and_puts_them_back(page):
    stored, recomputed = page.band("scheduled", "stored"), page.band("scheduled", "recomputed")
    assert stored
    legend = page.find("#holdings [data-holding=stored]")
    assert legend.get_attribute("aria-pressed") == "true"
    legend.click()
    page.settle()
    assert legend.get_attribute("aria-pressed") == "false"
    assert page.band("scheduled", "stored") == ""
    assert page.band("scheduled", "recomputed") not in ("", recomputed)
    assert not page.texts("#chart-scheduled .budget"), "a budget is nothing to compare a part of memory with"
    legend.click()
    page.settle()
    assert (page.band("scheduled", "stored"), page.band("scheduled", "recomputed")) == (stored, recomputed)


def test_either_run_alone(page, runs):
    page.find("#runs [data-run=scheduled]").click()
    page.settle()
    assert not page.find("#chart-scheduled").is_displayed()
    assert page.panel()["where"].startswith(f"Step {runs['plain'].timeline.peak_step + 1} of ")
    assert page.range().endswith(f"of {format_ms(runs['plain'].timeline.latency_ms)}")
    page.find("#runs [data-run=plain]").click()
    page.settle()
    assert page.find("#chart-scheduled").is_displayed()
    assert not page.find("#chart-plain").is_displayed(), "one of them is always shown"


def test_search_finds_operators_and_modules(page, resnet, runs):
    graph = resnet.profile.graph
    page.find("#query").send_keys("Layer3.4.CONV2")
    page.settle()
    operators = [graph.operators[index] for index, _ in runs["scheduled"].timeline.steps]
    found = [
        at
        for at, operator in enumerate(operators)
        if "layer3.4.conv2" in operator.name or "layer3.4.conv2" in operator.module
    ]
    assert len(found) > 2
    assert page.text("#found") == f"{len(found)} steps of the schedule"
    assert [int(text.rpartition(" ")[2]) for text in page.texts("#matches li")] == [at + 1 for at in found]
    for step in found[:2]:
        page.find("#query").send_keys(Keys.ENTER)
        page.settle()
        check_panel(page.panel(), graph, runs["scheduled"], step)
    page.find("#query").send_keys(" nowhere")
    assert page.text("#found") == "0 steps of the schedule"


def column(page, section, number):
    return page.texts(f"#{section} tbody td:nth-child({number})")


def test_the_table_of_values_sorts_filters_and_says_what_becomes_of_each(page, resnet, runs):
    graph, breakdown = resnet.profile.graph, runs["scheduled"]
    sizes = sorted(graph.values[value].size_bytes for value in {stay.value for stay in breakdown.lifetimes})
    assert column(page, "values", 2) == [format_bytes(size) for size in sizes[::-1][:25]]
    head = page.find("#values th:nth-child(2)")
    assert head.get_attribute("aria-sort") == "descending"
    head.find_element(By.TAG_NAME, "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(page, "values", 2) == [format_bytes(size) for size in sizes[:25]]
    assert page.text("#values output") == f"1–25 of {len(sizes)}"

    recomputed = next(iter(resnet.schedule.choices.before["layer1.0.bn3.backward"]))[0]
    for name, fate in (("layer1.0.relu", "stored"), (f"{recomputed}[0]", "recomputed once")):
        filter_by = page.find("#values input")
        filter_by.clear()
        filter_by.send_keys(name)
        rows = dict(zip(column(page, "values", 1), column(page, "values", 4), strict=True))
        assert rows[name] == fate, name
    assert "layer1.0.relu" in resnet.schedule.choices.stored
    assert f"{recomputed}[0]" not in resnet.schedule.choices.stored


@pytest.mark.thorough
def test_the_tables_of_what_is_run_otherwise_and_again(page, resnet, runs):
    timeline, graph = runs["scheduled"].timeline, resnet.profile.graph
    ran, again = set(), []
    for at, (index, _) in enumerate(timeline.steps):
        again += [at] if index in ran else []
        ran.add(index)
    in_plain = {index for index, _ in runs["plain"].timeline.steps}
    extra = sorted(at for at, (index, _) in enumerate(timeline.steps) if index not in in_plain and at not in again)
    beyond = sorted(again + extra)
    assert again
    assert extra
    assert column(page, "again", 1) == [str(at + 1) for at in beyond[:25]]
    assert column(page, "again", 6) == [format_ms(timeline.latencies_ms[at]) for at in beyond[:25]]
    total = format_ms(sum(timeline.latencies_ms[at] for at in again))
    assert f"{len(again)} steps run again, {total};" in page.text("#again p")
    others = [at for at, (_, way) in enumerate(timeline.steps) if way != 0]
    assert column(page, "ways", 1) == [str(at + 1) for at in others[:25]]
    page.find("#ways .pages button:nth-of-type(2)").click()
    names = [graph.operators[timeline.steps[at][0]].name for at in others[25:50]]
    assert column(page, "ways", 2) == names
    page.find("#ways tbody .link").click()
    page.settle()
    assert page.panel()["name"] == names[0], "a name in a table leads to its step"
