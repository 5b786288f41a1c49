"""Latency of a prediction after a stroke, and concurrent strokes of two tabs."""

import json
import os
import time
from statistics import median, quantiles

import pytest

from tests.app.web.browser import settle

pytestmark = pytest.mark.browser

TOOLS = """
const canvas = document.getElementById('drawing');
const box = canvas.getBoundingClientRect();
const send = (kind, [x, y]) => canvas.dispatchEvent(new PointerEvent(kind, {
  isPrimary: true, pointerId: 1, bubbles: true,
  clientX: box.left + x * box.width, clientY: box.top + y * box.height,
}));
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
"""
STROKES = """async (strokes) => {
  for (const [first, ...others] of strokes) {
    send('pointerdown', first);
    for (const point of others) send('pointermove', point);
    send('pointerup', others.at(-1));
    await sleep(20);
  }
}"""
# Returns the milliseconds from the end of each stroke to the prediction on the page, and of as many
# requests for a small file. A stroke has a point in each frame.
MEASURE = """async (count) => {
  const output = document.getElementById('digit');
  const answered = () => new Promise((resolve) => {
    const isDone = () => output.dataset.version === document.body.dataset.version;
    if (isDone()) return resolve();
    const observer = new MutationObserver(() => {
      if (isDone()) { observer.disconnect(); resolve(); }
    });
    observer.observe(output, { attributes: true });
  });
  const timed = async (action) => {
    await answered();
    await sleep(16);
    const start = performance.now();
    await action();
    return performance.now() - start;
  };
  const [strokes, requests] = [[], []];
  for (let i = 0; i < count; i++) {
    const last = [0.4 + 0.3 * i / count, 0.8];
    send('pointerdown', [0.3, 0.2]);
    await timed(() => send('pointermove', [0.7, 0.25]));
    strokes.push(await timed(() => {
      send('pointermove', last);
      send('pointerup', last);
      return answered();
    }));
    document.getElementById('clear').click();
    requests.push(await timed(async () =>
      (await fetch('icon.svg', { cache: 'no-store' })).text()));
  }
  return [strokes, requests];
}"""


class Unwatched:
    """A page outside Playwright, whose request tracking doubles the latency."""

    def __init__(self, browser, address):
        self.session = browser.new_browser_cdp_session()
        self.session.on("Target.receivedMessageFromTarget", self._receive)
        self.answers = []
        options = {"url": address, "width": 1280, "height": 860, "newWindow": True}
        self.target = self.session.send("Target.createTarget", options)
        attach = self.target | {"flatten": False}
        self.attached = self.session.send("Target.attachToTarget", attach)

    def _receive(self, event):
        self.answers.append(json.loads(event["message"]))

    def evaluate(self, script):
        """Return the script's resolved value, or None if the page is loading."""
        options = {"expression": script, "awaitPromise": True, "returnByValue": True}
        message = {"id": 1, "method": "Runtime.evaluate", "params": options}
        call = {**self.attached, "message": json.dumps(message)}
        self.session.send("Target.sendMessageToTarget", call)
        while not self.answers:
            time.sleep(0.1)
            self.session.send("Target.getTargets")  # delivers pending events
        answer = self.answers.pop().get("result", {})
        assert "exceptionDetails" not in answer, answer
        return answer.get("result", {}).get("value")

    def close(self):
        self.session.send("Target.closeTarget", self.target)


def report(times):
    return {"p50": round(median(times), 1), "p99": round(quantiles(times, n=100)[98], 1)}


def test_latency_is_a_few_requests(browser, server, capsys):
    """Compare with the latency of a request, and print the times for runs on an idle machine."""
    page = Unwatched(browser, server.address)
    while not page.evaluate("document.body?.dataset.ready"):
        time.sleep(0.2)

    def measure(count):
        return page.evaluate(f"{{ {TOOLS} ({MEASURE})({count}) }}")

    measure(5)
    strokes, requests = measure(int(os.environ.get("STROKES", 40)))
    page.close()
    with capsys.disabled():
        print(f"\nms from a stroke's end to its answer: {report(strokes)}", end=", ")
        print(f"bare request {report(requests)}")
    assert median(strokes) < 5 * median(requests)


def test_two_tabs_keep_all_strokes(visit):
    pages = [visit(), visit()]
    strokes = [[[0.5, 0.2 + 0.012 * i], [0.5, 0.212 + 0.012 * i]] for i in range(50)]  # a 1
    for page in pages:  # returns at once: both pages draw concurrently
        page.evaluate(f"strokes => {{ {TOOLS} window.done = ({STROKES})(strokes) }}", strokes)
    start = time.perf_counter()
    for page in pages:
        page.evaluate("window.done")
    assert time.perf_counter() - start < 30
    answers = [settle(page) for page in pages]
    assert answers[0] == answers[1] != ""
    shown = [page.locator("img").first.get_attribute("src") for page in pages]
    assert shown[0] == shown[1]
    for page in pages:
        for _ in strokes:
            assert page.is_enabled("#undo")
            page.click("#undo")
        assert settle(page) == ""
        assert page.is_disabled("#undo")
