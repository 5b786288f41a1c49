"""From the end of a stroke to its answer, and what is lost when many come at once."""

import os
import time
from statistics import median, quantiles

import pytest

from tests.app.web.browser import settle

pytestmark = pytest.mark.browser

# Draws strokes with synthetic pointer events, `pause` milliseconds apart, and returns for each the
# milliseconds from its end to the answer on the page; with `wait` each waits for its answer.
STROKES = """async ({ strokes, pause, wait }) => {
  const canvas = document.getElementById('drawing');
  const output = document.getElementById('digit');
  const box = canvas.getBoundingClientRect();
  const send = (kind, [x, y]) => canvas.dispatchEvent(new PointerEvent(kind, {
    isPrimary: true, pointerId: 1, bubbles: true,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height,
  }));
  const answered = (version) => new Promise((resolve) => {
    const isDone = () => Number(output.dataset.version) >= version;
    const observer = new MutationObserver(() => {
      if (isDone()) { observer.disconnect(); resolve(performance.now()); }
    });
    observer.observe(output, { attributes: true });
    if (isDone()) { observer.disconnect(); resolve(performance.now()); }
  });
  const times = [];
  for (const points of strokes) {
    send('pointerdown', points[0]);
    for (const point of points) send('pointermove', point);
    if (wait) await answered(Number(document.body.dataset.version)); // of the last move
    const end = performance.now();
    send('pointerup', points.at(-1));
    const done = answered(Number(document.body.dataset.version)).then((t) => times.push(t - end));
    if (wait) await done;
    if (pause) await new Promise((resolve) => setTimeout(resolve, pause));
  }
  return times;
}"""


# Milliseconds of requests for a small file.
REQUESTS = """async (count) => {
  const times = [];
  for (let i = 0; i < count; i++) {
    const start = performance.now();
    await (await fetch('icon.svg', { cache: 'no-store' })).text();
    times.push(performance.now() - start);
  }
  return times;
}"""


def measure(page, count):
    strokes = [[[0.3, 0.2], [0.7, 0.25], [0.4 + 0.002 * i, 0.8]] for i in range(count)]
    times = []
    for stroke in strokes:  # one on the sheet at a time
        times += page.evaluate(STROKES, {"strokes": [stroke], "pause": 0, "wait": True})
        page.keyboard.press("c")
        settle(page)
    return times


def report(times):
    return {"p50": round(median(times), 1), "p99": round(quantiles(times, n=100)[98], 1)}


def test_an_answer_takes_little_more_than_a_request(page, capsys):
    """The bound is relative, for busy machines; the printed times count on an idle one."""
    page.locator("#samples button").first.wait_for(timeout=60_000)
    count = int(os.environ.get("STROKES", 40))
    measure(page, 5)
    request = page.evaluate(REQUESTS, count)
    with_maps = measure(page, count)
    page.uncheck("#maps")
    without = measure(page, count)
    with capsys.disabled():
        print(f"\nms from a stroke's end to its answer: {report(with_maps)}", end=", ")
        print(f"without maps {report(without)}; bare request {report(request)}")
    assert median(with_maps) < 10 * median(request)
    assert median(without) < 8 * median(request)


def test_fifty_strokes_a_second_from_two_tabs_lose_nothing(visit):
    pages = [visit(), visit()]
    strokes = [[[0.3, 0.02 * i], [0.7, 0.02 * i]] for i in range(50)]
    for page in pages:  # both draw at once: the first call does not wait for its strokes
        page.evaluate(
            f"strokes => {{ window.done = ({STROKES})({{ strokes, pause: 20, wait: false }}) }}",
            strokes,
        )
    start = time.perf_counter()
    for page in pages:
        page.evaluate("window.done")
    assert time.perf_counter() - start < 30
    answers = [settle(page) for page in pages]
    assert answers[0] == answers[1] != ""
    shown = (
        "[...document.querySelector('.input canvas').getContext('2d')"
        ".getImageData(0, 0, 28, 28).data]"
    )
    assert pages[0].evaluate(shown) == pages[1].evaluate(shown)
    for page in pages:
        for _ in strokes:  # every stroke is there: undo takes each back
            assert page.is_enabled("#undo")
            page.keyboard.press("Control+z")
        assert settle(page) == ""
        assert page.is_disabled("#undo")
