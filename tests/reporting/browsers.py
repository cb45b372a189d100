"""A headless Chromium for tests, which loads nothing of its own accord, and a report in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


READ_PANEL = """
const panel = document.getElementById("panel");
const text = (node) => node.textContent;
const all = (selector, within = panel) => [...within.querySelectorAll(selector)];
all("button").find((button) => text(button).startsWith("Show all"))?.click();
const tensor = [".what", ".size", ".since", ".why"];
const terms = all("dt").map(text), said = all("dd").map(text);
return {
  where: text(panel.querySelector(".where")),
  name: text(panel.querySelector("h3")),
  facts: Object.fromEntries(terms.map((term, number) => [term, said[number]])),
  memory: text(panel.querySelector("caption")),
  holdings: Object.fromEntries(all("tr").map((row) => [text(row.children[0]), text(row.children[1])])),
  tensors: all("li").map((item) => tensor.map((part) => text(item.querySelector(part)))),
};
"""


@contextmanager
def chromium(folder: Path) -> Iterator:
    """A browser whose own data is in a folder; the test is skipped, or fails in CI, where there is none."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        missing = "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
        if os.environ.get("MONETLITE_BROWSER_TESTS"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Page:
    """A report in a browser, used through what a person sees, points at and presses."""

    def __init__(self, browser, path):
        self.browser = browser
        browser.get(path.as_uri())
        self.settle()

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.find(selector).get_attribute("textContent")

    def texts(self, selector):
        return [item.get_attribute("textContent") for item in self.browser.find_elements(By.CSS_SELECTOR, selector)]

    def plot(self, run):
        return self.find(f"#chart-{run} .plot")

    def press(self, label):
        self.find(f"[aria-label='{label}']").click()
        self.settle()

    def settle(self):
        """Wait for what was done to be drawn."""
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def range(self):
        return self.text("#range")

    def band(self, run, holding):
        return self.find(f"#chart-{run} path[data-holding='{holding}']").get_attribute("d")

    def axis(self, run):
        """Pixels from the left of the plot at which its horizontal axis begins and ends."""
        line = self.find(f"#chart-{run} .grid line")
        return float(line.get_attribute("x1")), float(line.get_attribute("x2"))

    def hover(self, run, share):
        """Point at a share of the axis; the place really pointed at, as a share."""
        begin, end = self.axis(run)
        box = self.browser.execute_script(
            "arguments[0].scrollIntoView({block: 'center'}); return arguments[0].getBoundingClientRect()",
            self.plot(run),
        )
        pixels = round(box["left"] + begin + share * (end - begin))
        actions = ActionBuilder(self.browser, duration=0)
        actions.pointer_action.move_to_location(pixels, round(box["top"] + box["height"] / 2))
        actions.perform()
        self.settle()
        return (pixels - box["left"] - begin) / (end - begin)

    def step(self, run):
        """Position of the step that a chart looks at; people read its number."""
        return int(self.plot(run).get_attribute("aria-valuenow")) - 1

    def panel(self):
        return self.browser.execute_script(READ_PANEL)
