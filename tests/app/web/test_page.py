"""The page of app.draw in Chromium."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.app.web.browser import draw, settle
from tests.app.web.strokes import DIGITS
from tests.networks import HAS_MNIST

pytestmark = pytest.mark.browser


def test_recognises_nine_of_ten_digits(page):
    answers = {}
    for digit in DIGITS:
        draw(page, digit)
        answers[digit] = settle(page)
        page.click("#clear")
    least = 9 if HAS_MNIST else 7  # trained on scikit-learn's digits
    assert sum(answer == digit for digit, answer in answers.items()) >= least, answers


def test_probabilities_are_shown_as_ten_bars(page):
    draw(page, "7")
    digit = settle(page)
    bars = page.locator("#bars li").all_text_contents()
    assert [bar[0] for bar in bars] == list("0123456789")
    assert sum(float(bar[1:].rstrip("%")) for bar in bars) == pytest.approx(100, abs=0.6)
    best = page.locator("#bars .best")
    assert best.text_content()[0] == digit
    assert best.evaluate("bar => bar.style.getPropertyValue('--share')") == best.text_content()[1:]


def predictions_of(page, event):
    """Collect the requests for predictions (or "response"s) of the page from now on."""
    found = []
    page.on(event, lambda it: found.append(it) if "api/predict?" in it.url else None)
    return found


def test_framing_matches_predict(page):
    from app.inference.preprocess import frame

    requests = predictions_of(page, "request")
    draw(page, "2")
    settle(page)
    sent = np.frombuffer(requests[-1].post_data_buffer, np.uint8).reshape(-1, 140)
    source = page.locator("figure img").first.get_attribute("src")
    shown = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert np.array_equal(np.asarray(shown), frame(sent.copy(), "mnist")[0])


def test_undo_removes_the_last_stroke(page):
    draw(page, "1")
    before = settle(page)
    draw(page, "0")
    settle(page)
    page.click("#undo")
    assert settle(page) == before


@pytest.mark.parametrize("button", ["undo", "clear"])
@pytest.mark.parametrize("strokes", ["", "1"])
def test_stroke_ends_when_it_is_removed(page, button, strokes):
    """By the keyboard, while the pointer is down; errors of the page fail the test."""
    box = page.locator("#drawing").bounding_box()
    for digit in strokes:
        draw(page, digit)
    settle(page)
    kept = "" if button == "clear" else page.locator("#pictures").inner_html()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 90, box["y"] + 90)
    page.locator(f"#{button}").dispatch_event("click")
    page.mouse.move(box["x"] + 300, box["y"] + 300, steps=5)
    for _ in range(2):
        settle(page)
        assert page.locator("#pictures").inner_html() == kept
        page.mouse.up()
    assert page.locator("#message").text_content() == ""


def test_lone_dot_is_no_digit(page):
    box, message = page.locator("#drawing").bounding_box(), page.locator("#message")
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    settle(page)
    assert message.text_content() == ""  # it may become a digit
    page.mouse.up()
    settle(page)
    assert message.text_content() == "No digit found"
    page.click("#clear")
    settle(page)
    assert message.text_content() == ""


def test_pointerup_sends_no_second_request(page):
    sent = predictions_of(page, "request")
    box = page.locator("#drawing").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 300)
    answer = settle(page)
    count = len(sent)
    page.mouse.up()
    assert settle(page) == answer
    assert len(sent) == count > 0


def test_maps_of_first_convolution_and_ncrelu_are_shown(page):
    draw(page, "5")
    settle(page)
    captions = page.locator("figcaption").all_text_contents()
    assert captions == ["28 × 28, as the network gets it", "First convolution", "First ncrelu"]
    maps = page.locator("img").last
    assert maps.is_visible()
    shown = maps.get_attribute("src")
    draw(page, "7")
    settle(page)
    assert maps.get_attribute("src") != shown
    page.click("#clear")
    assert settle(page) == ""
    assert page.locator("figure").count() == page.locator("#bars li").count() == 0


def test_selecting_a_network_predicts_at_once(page):
    received = predictions_of(page, "response")
    draw(page, "6")
    settle(page)
    count = len(received)
    page.dispatch_event("#network", "change")
    assert settle(page) == "6"
    assert len(received) == count + 1


def test_touch_draws(visit):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    client = page.context.new_cdp_session(page)
    box = page.locator("#drawing").bounding_box()

    def touch(kind, *point):
        places = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
                  for x, y in point]  # fmt: skip
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    for points in DIGITS["7"]:
        touch("touchStart", points[0])
        for point in points[1:]:
            touch("touchMove", point)
        touch("touchEnd")
    assert settle(page) == "7"
    assert page.evaluate("scrollY") == 0


def test_layout_on_a_narrow_screen(visit):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    draw(page, "3")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    answer = page.locator("#digit").bounding_box()
    assert answer["y"] + answer["height"] < 844  # visible without scrolling


def test_controls_have_accessible_names_and_live_regions(page):
    output = page.locator("#digit")
    assert output.get_attribute("aria-live") == "polite"
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, select, input, canvas[tabindex]')].filter(
          (e) => !(e.textContent.trim() && e.tagName !== 'SELECT') && !e.ariaLabel
            && !e.labels?.length).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_text_has_enough_contrast(page):
    """Require WCAG 2.2 AA: a contrast ratio of 4.5."""
    colours = page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          const names = ['--page', '--bar', '--text', '--wrong'];
          return Object.fromEntries(names.map((n) => [n, style.getPropertyValue(n).trim()]));
        }"""
    )

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground, text in (("--page", "--text"), ("--bar", "--text"), ("--page", "--wrong")):
        dark, bright = sorted((luminance(colours[ground]), luminance(colours[text])))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
