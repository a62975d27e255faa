"""The page, in a real browser: it shows the batch, sends to it, and outlives the server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import server_parts
from page_parts import SLOW, is_live, opened
from server_parts import MODEL, make_rig, serving

import hotbatch
from hotbatch.core.service_class import LatencyTargets, ServiceClass
from hotbatch.engine.ceiling import Ceiling, ModelWork

WORK = ModelWork(3e6, 1e6, 700.0, 2.5e5, 0.5e5, 1.0)
SCRIPT = Path(server_parts.__file__).with_name("serve_simulated.py")
CEILING = Ceiling(1e9, 1e9, 1e12, "made up")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_and_asks_nobody_else(browser: Any, scheme: str) -> None:
    with serving(make_rig()) as rig, opened(browser, rig.url, color_scheme=scheme) as seen:
        is_live(seen)
        assert seen.text("model") == MODEL
        assert hotbatch.__version__ in seen.text("version")
        seen.until("document.getElementById('v-seats').textContent === 'of 256 seats'")
        seen.until("document.querySelectorAll('.uplot').length === 5")
        assert seen.hosts() == {urlsplit(rig.url).netloc}
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(background.split("(")[1].split(",")[0]) > 128) == (scheme == "light")


def test_a_burst_is_sent_and_drawn(browser: Any) -> None:
    targets = {ServiceClass.INTERACTIVE: LatencyTargets(1.0, 0.1)}
    rig = make_rig(
        executor={**SLOW, "work": WORK},
        ceiling=CEILING,
        max_num_seqs=64,
        scheduler={"targets": targets},
    )
    with serving(rig), opened(browser, rig.url) as seen:
        is_live(seen)
        assert seen.inked() == 0
        seen.send(kind="mixed", count=100, max_tokens=60)
        seen.until("Number(document.getElementById('v-running').textContent) > 20")
        seen.until("document.getElementById('tally').textContent.includes('100 done')")
        assert seen.inked() > 1000
        assert seen.text("v-busy-name") == "Decode utilisation"
        seen.until("document.getElementById('lat-2-0').textContent.includes('ms')")
        assert seen.page.locator("#dots i[data-state=done]").count() == 100
        assert {"interactive", "standard", "batch"} == set(
            seen.page.evaluate(
                "[...document.querySelectorAll('#dots i')].map(d => d.dataset.class)"
            )
        )
        rig.wait_idle()


def test_one_answer_is_shown_and_can_be_stopped(browser: Any) -> None:
    with serving(make_rig(executor=SLOW)) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        seen.page.locator("#prompt").fill("hello")
        seen.send(max_tokens=20)
        seen.until("document.getElementById('tally').textContent.includes('1 done')")
        prompt = rig.chat_prompt("hello")
        assert rig.service.engine.stats().prompt_tokens == len(prompt)
        assert seen.text("answer")
        seen.send(max_tokens=400)
        seen.until("document.getElementById('tally').textContent.includes('1 writing')")
        rig.executor.gate.clear()  # so that it cannot end by itself, however slow we are
        seen.page.locator("#stop").click()
        seen.until("document.getElementById('tally').textContent.includes('1 cut')")
        rig.executor.gate.set()
        rig.wait_idle()


def test_a_refusal_is_told(browser: Any) -> None:
    with serving(make_rig()) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        seen.page.locator("#prompt").fill("hello " * 300)
        seen.send(max_tokens=400)
        seen.until("document.getElementById('tally').textContent.includes('context length')")
        seen.errors.clear()  # the browser logs the 400, which is wanted here


def test_it_outlives_the_server(browser: Any) -> None:
    with process() as (first, url), opened(browser, url) as seen:
        is_live(seen)
        seen.send(max_tokens=5)
        seen.until("document.getElementById('tally').textContent.includes('1 done')")
        first.send_signal(signal.SIGTERM)
        seen.until("document.getElementById('status').dataset.state === 'lost'")
        assert first.wait(30) == 0, "an open page must not hold the server up"
        assert first.stderr is not None
        assert "Traceback" not in first.stderr.read()
        with process(str(urlsplit(url).port)) as (_, again):
            assert again == url
            is_live(seen)
            seen.send(max_tokens=5, count=8)
            seen.until("document.getElementById('tally').textContent.includes('8 done')")
            seen.page.goto("about:blank")
        seen.errors.clear()  # the browser logs each refused connection


@contextmanager
def process(*port: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), "0.002", "5", *port],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


def test_the_key_is_asked_for_and_kept(browser: Any) -> None:
    with serving(make_rig(api_keys=("right",))) as rig, opened(browser, rig.url) as seen:
        for key in ("wrong", "right"):
            seen.page.locator("#key-dialog[open]").wait_for()
            seen.page.locator("#key").fill(key)
            seen.page.keyboard.press("Enter")
            if key == "wrong":
                seen.until("document.getElementById('key-wrong').textContent !== ''")
        is_live(seen)
        seen.send(max_tokens=5)
        seen.until("document.getElementById('tally').textContent.includes('1 done')")
        seen.page.reload()
        is_live(seen)
        assert not seen.page.locator("#key-dialog[open]").count()
        assert seen.page.evaluate("Object.keys(localStorage).length") == 0
        seen.errors.clear()  # the browser logs each 401


def test_it_is_used_by_keyboard(browser: Any) -> None:
    with serving(make_rig(executor=SLOW)) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        keyboard = seen.page.keyboard
        keyboard.press("p")
        assert seen.page.evaluate("document.activeElement.id") == "prompt"
        keyboard.type("pt l")  # letters are text here, not shortcuts
        assert seen.page.locator("#prompt").input_value() == "pt l"
        seen.page.locator("#max-tokens").fill("400")
        seen.page.locator("#prompt").focus()
        keyboard.press("Control+Enter")
        seen.until("document.getElementById('tally').textContent.includes('1 writing')")
        rig.executor.gate.clear()
        seen.until("document.getElementById('v-running').textContent === '1'")
        seen.page.locator("#prompt").blur()
        keyboard.press("l")
        keyboard.press("ArrowDown")
        seen.until("document.getElementById('lane-said').textContent.includes('this playground')")
        assert seen.page.locator("#tip").is_visible()
        keyboard.press("Space")
        assert seen.page.locator("#freeze").get_attribute("aria-pressed") == "true"
        before = seen.text("window")
        keyboard.press("+")
        assert seen.text("window") != before
        keyboard.press("t")
        assert seen.page.evaluate("document.documentElement.dataset.theme") == "light"
        seen.page.locator("#stop").click()
        rig.executor.gate.set()
        rig.wait_idle()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_is_wider_than_the_screen(browser: Any, width: int) -> None:
    options = {"viewport": {"width": width, "height": 800}}
    with serving(make_rig()) as rig, opened(browser, rig.url, **options) as seen:
        is_live(seen)
        seen.until("document.getElementById('v-kv').textContent.includes('%')")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_new_size_is_drawn_at_once(browser: Any) -> None:
    """The browser shows what is there after a change of size, and an empty canvas is black."""
    with serving(make_rig()) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        colours = seen.page.evaluate(
            """async () => {
              const { Lanes } = await import("/dashboard/lanes.js");
              const { LaneBook } = await import("/dashboard/lane_book.js");
              const stage = document.createElement("div");
              stage.style = "width: 400px; height: 200px";
              document.body.append(stage);
              const canvas = document.createElement("canvas");
              stage.append(canvas);
              const lanes = new Lanes(canvas, new LaneBook(), ["batch", "standard", "interactive"]);
              const middle = () => [...lanes.view.getImageData(canvas.width / 2, 9, 1, 1).data];
              const first = middle();
              stage.style.width = "300px";
              lanes.restyle();
              return [first, middle(), canvas.width];
            }"""
        )
        first, second, width = colours
        assert width == 300
        assert first == second and first[3] == 255, "nothing is drawn where nothing covers"


def test_the_lanes_follow_the_scheduler(browser: Any) -> None:
    """Few blocks: somebody is paused or evicted, and the page knows."""
    rig = make_rig(executor=SLOW, num_blocks=40, max_num_seqs=8)
    with serving(rig), opened(browser, rig.url) as seen:
        is_live(seen)
        seen.page.locator("#prompt").fill("x")
        seen.send(kind="batch", count=8, max_tokens=300)
        seen.until("document.getElementById('v-paused').textContent !== ''")
        seen.page.locator("#stop").click()
        rig.wait_idle()
        seen.until("document.getElementById('v-paused').textContent === ''")


def test_auto_is_as_the_system_is_and_follows_it(browser: Any) -> None:
    theme = "document.documentElement.dataset.theme"
    with serving(make_rig()) as rig, opened(browser, rig.url, color_scheme="dark") as seen:
        is_live(seen)
        assert seen.page.evaluate(theme) == "dark"
        seen.page.emulate_media(color_scheme="light")
        seen.until(f"{theme} === 'light'")
        for shown in ("light", "dark"):
            seen.page.locator("#theme").click()
            assert seen.text("theme") == seen.page.evaluate(theme) == shown
        seen.page.reload()
        assert seen.page.evaluate(theme) == "dark", "a choice is kept"
        seen.page.locator("#theme").click()
        assert (seen.text("theme"), seen.page.evaluate(theme)) == ("auto", "light")


def test_a_guess_has_a_lane_until_it_is_claimed_or_dropped(browser: Any) -> None:
    with serving(make_rig()) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        seats = seen.page.evaluate(
            """async () => {
              const { LaneBook } = await import("/dashboard/lane_book.js");
              const book = new LaneBook();
              const asked = [7, 2, 0, 5, 0, 0, 0, 5];
              const seats = (ahead) => {
                const cells = [...book.take({ lanes: asked, ahead }, () => false)];
                return [cells, book.seats.map((lane) => lane.class)];
              };
              const working = [0, 0, 9, 0, 9, 1, 0, 0, 2, 8];
              const over = [0, 2, 0, 0, 9, 1, 3, 0, 0, 8];
              return [seats(working), seats(over), seats()];
            }"""
        )
        (first, classes), (second, left), (_, last) = seats
        assert classes == [2, 3, 3]
        assert first[8:] == [1, 3, 0, 9, 0, 0, 0, 0, 2, 3, 0, 0, 2, 0, 0, 0]
        assert [second[at] for at in (10, 18)] == [3, 4], "claimed is done, dropped is cut"
        assert left == last == [2]


def test_its_files_are_all_there_is(browser: Any) -> None:
    """What the page loads is in the package, with nothing left over."""
    from hotbatch.dashboard.assets import INDEX, assets

    with serving(make_rig()) as rig, opened(browser, rig.url) as seen:
        is_live(seen)
        loaded = {urlsplit(url).path.removeprefix("/dashboard/") for url in seen.urls}
        left = assets().keys() - loaded - {INDEX, "vendor/uPlot.LICENSE"}
        assert not left
        assert httpx.get(f"{rig.url}/dashboard/vendor/uPlot.LICENSE", trust_env=False).is_success
