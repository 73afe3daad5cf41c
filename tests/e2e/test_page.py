"""The page in a real browser: typed into, read, used by keyboard alone. Skipped without Chromium; REQUIRE_BROWSER=1 fails instead."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1440,900"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        missing = "no chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, stack) -> webdriver.Chrome:
    browser.get(stack.gateway.http)
    until(browser, lambda: "positions" in text_of(browser, "model"))
    browser.find_element(By.CSS_SELECTOR, "#speculation option[value=required]").click()
    return browser


def until(browser: webdriver.Chrome, what) -> None:
    WebDriverWait(browser, WAIT_S, poll_frequency=0.1).until(lambda _: what())


def text_of(browser: webdriver.Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).get_property("textContent")


def idle(browser: webdriver.Chrome) -> bool:
    return browser.find_element(By.ID, "stop").get_property("disabled") and bool(figures(browser))


def figures(browser: webdriver.Chrome) -> list[list[str]]:
    rows = browser.find_elements(By.CSS_SELECTOR, "#figures tbody tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


def fill(browser: webdriver.Chrome, name: str, value: str) -> None:
    field = browser.find_element(By.ID, name)
    field.clear()
    field.send_keys(value)


def continues_text(browser: webdriver.Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, "#kind option[value=text]").click()


def test_a_conversation_keeps_what_was_said(page: webdriver.Chrome) -> None:
    """Each answer has its own block; a new conversation begins without them."""
    prompt = page.find_element(By.ID, "prompt")
    assert prompt.get_property("value")
    fill(page, "tokens", "24")
    for number, said in enumerate(("Return the mean of a list", "And its median"), start=1):
        fill(page, "prompt", said)
        page.find_element(By.ID, "run").click()
        until(page, lambda: idle(page) and not prompt.get_property("value"))
        assert [one.text for one in page.find_elements(By.CSS_SELECTOR, "#text .question")][-1] == said
        assert len(page.find_elements(By.CSS_SELECTOR, "#text .answer .token")) == 24 * number
    assert page.execute_script("return performance.getEntriesByType('resource').at(-1).name").endswith(
        "chat/completions"
    )
    page.find_element(By.ID, "new-conversation").click()
    assert not text_of(page, "text")
    assert prompt.get_property("value")


def test_a_message_during_an_answer_ends_it_and_has_its_own(page: webdriver.Chrome) -> None:
    fill(page, "tokens", "900")
    page.find_element(By.ID, "run").click()
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, "#text .token")) > 3)
    fill(page, "tokens", "8")
    fill(page, "prompt", "Return the largest of a list")
    page.find_element(By.ID, "run").click()
    until(page, lambda: idle(page) and not page.find_element(By.ID, "prompt").get_property("value"))
    answers = page.find_elements(By.CSS_SELECTOR, "#text .answer")
    assert len(answers[-1].find_elements(By.CSS_SELECTOR, ".token")) == 8
    fill(page, "prompt", "And the smallest")
    fill(page, "tokens", "900")
    page.find_element(By.ID, "run").click()
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, "#text .answer")[-1].text) > 3)
    page.find_element(By.ID, "new-conversation").click()
    assert not text_of(page, "text")
    assert page.find_element(By.ID, "stop").get_property("disabled")


def test_text_and_trees_arrive_and_both_ways_of_decoding_agree(page: webdriver.Chrome) -> None:
    continues_text(page)
    fill(page, "prompt", "def mean(values):\n    ")
    fill(page, "tokens", "60")
    page.find_element(By.ID, "compare").click()
    until(page, lambda: idle(page) and len(figures(page)) == 2)
    plain, speculating = figures(page)
    assert (plain[0], speculating[0]) == ("plain decoding", "speculation in every round")
    assert plain[1] == speculating[1]  # temperature 0: as many tokens either way
    assert float(plain[3]) == 1.0 < float(speculating[3])
    assert "×" in speculating[4]
    tokens = page.find_elements(By.CSS_SELECTOR, "#text .token")
    assert len(tokens) == int(speculating[1])
    kinds = {kind: len(page.find_elements(By.CSS_SELECTOR, f"#text .{kind}")) for kind in ("accepted", "bonus")}
    assert kinds["bonus"] <= int(speculating[2])
    assert kinds["accepted"] > 0
    assert page.find_elements(By.CSS_SELECTOR, "#tree svg .bonus")
    assert page.find_elements(By.CSS_SELECTOR, "#depths .bar")
    best = most_accepted(page)
    assert page.find_elements(By.CSS_SELECTOR, "#tree svg .taken"), best
    complaints = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert not complaints


def most_accepted(page: webdriver.Chrome) -> str:
    """Goes through all rounds by keyboard, and back to the one that accepted most."""
    tree = page.find_element(By.ID, "tree")
    told = [text_of(page, "round")]
    while not told[-1].startswith("round 1 of"):
        tree.send_keys(Keys.ARROW_LEFT)
        told.append(text_of(page, "round"))
    best = max(told, key=lambda one: [int(n) for n in re.findall(r": (\d+) of (\d+)", one)[0]])
    tree.send_keys(*[Keys.ARROW_RIGHT] * (len(told) - 1 - told.index(best)))
    assert text_of(page, "round") == best
    return best


def test_the_keyboard_alone_starts_and_stops(page: webdriver.Chrome) -> None:
    continues_text(page)
    prompt = page.find_element(By.ID, "prompt")
    fill(page, "prompt", "class Tree:")
    fill(page, "tokens", "900")
    prompt.send_keys(Keys.CONTROL, Keys.ENTER)
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, "#text .token")) > 3)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    until(page, lambda: idle(page))
    assert not text_of(page, "error")
    assert int(figures(page)[0][1]) < 900


def test_a_refusal_is_shown_and_text_is_never_markup(page: webdriver.Chrome) -> None:
    fill(page, "tokens", "100000")
    page.find_element(By.ID, "run").click()  # the form itself refuses what is outside its range
    page.execute_script("document.getElementById('tokens').removeAttribute('max')")
    page.find_element(By.ID, "run").click()
    until(page, lambda: "max_tokens" in text_of(page, "error") or "context" in text_of(page, "error"))
    assert not text_of(page, "text")
    page.execute_script(
        "import('./page/tree.js').then(m => document.getElementById('tree').replaceChildren("
        "m.drawRound({nodes: [{token: '<img src=x onerror=alert(1)>', parent: 0}], path: [1], tokens: ['a', 'b']}, 'r')))"
    )
    until(page, lambda: page.find_elements(By.CSS_SELECTOR, "#tree svg .taken"))
    assert not page.find_elements(By.CSS_SELECTOR, "#tree img")
