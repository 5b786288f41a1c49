"""The page of app.draw in Chromium."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.app.web.browser import draw, settle
from tests.app.web.strokes import DIGITS
from tests.networks import HAS_MNIST

pytestmark = pytest.mark.browser


def png(points, size=(600, 400), ink=40, paper=235):
    """Return a PNG file of one stroke."""
    image = Image.new("L", size, paper)
    places = [(x * size[0], y * size[1]) for x, y in points]
    ImageDraw.Draw(image).line(places, fill=ink, width=24, joint="curve")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_recognises_nine_of_ten_digits(page):
    answers = {}
    for digit in DIGITS:
        page.keyboard.press("c")
        draw(page, digit)
        answers[digit] = settle(page)
    least = 9 if HAS_MNIST else 7  # trained on scikit-learn's digits
    assert sum(answer == digit for digit, answer in answers.items()) >= least, answers


def test_probabilities_are_shown_as_ten_bars(page):
    draw(page, "7")
    digit = settle(page)
    shares = page.locator(".bars .share").all_text_contents()
    assert len(shares) == 10
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.6)
    assert page.locator(".bars .best .name").text_content() == digit
    starts = {bar.bounding_box()["x"] for bar in page.locator(".track").all()}
    assert len(starts) == 1  # a bold or long name does not move its bar


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
    shown = page.evaluate(
        "[...document.querySelector('.input canvas').getContext('2d')"
        ".getImageData(0, 0, 28, 28).data].filter((_, index) => index % 4 === 0)"
    )
    assert shown == frame(sent.copy(), "mnist").flatten().tolist()


def test_undo_restores_a_cleared_drawing(page):
    draw(page, "3")
    answered = settle(page)
    assert answered
    page.click("#clear")
    assert settle(page) == ""
    assert page.is_disabled("#clear")
    page.click("#undo")
    assert settle(page) == answered


def test_undo_removes_the_last_stroke(page):
    draw(page, "1")
    before = settle(page)
    draw(page, "0")
    settle(page)
    page.keyboard.press("Control+z")
    assert settle(page) == before


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
    captions = page.locator(".layer figcaption").all_text_contents()
    assert captions == ["First convolution", "Positive half", "Negative half"]
    for selector in (".layer:not(.half)", ".layer.half"):
        assert page.locator(f"{selector} >> nth=0 >> canvas").is_visible()
    boxes = [page.locator(".half").nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    picture = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 14, 14).data].join()"
    shown = page.locator(".half canvas").first.evaluate(picture)
    draw(page, "7")
    settle(page)
    assert page.locator(".half canvas").first.evaluate(picture) != shown


def test_selecting_a_network_predicts_at_once(page):
    received = predictions_of(page, "response")
    draw(page, "6")
    settle(page)
    exported = page.locator("select option").nth(1).get_attribute("value")
    assert exported.endswith("model.onnx")
    count = len(received)
    page.select_option("select", exported)
    page.wait_for_selector("text=choose torch to see the layers")
    (response,) = received[count:]
    assert response.json()["class"] == "6"


def test_picture_can_be_opened_and_dropped(page):
    seven = png(DIGITS["7"][0])
    page.set_input_files("#picture", {"name": "7.png", "mimeType": "image/png", "buffer": seven})
    page.locator("#digit", has_text="7").wait_for()
    page.click("#clear")
    settle(page)
    page.evaluate(
        """bytes => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], '7.png', { type: 'image/png' }));
          const options = { dataTransfer: data, bubbles: true, cancelable: true };
          document.body.dispatchEvent(new DragEvent('drop', options));
        }""",
        list(seven),
    )
    page.locator("#digit", has_text="7").wait_for()


def test_invalid_picture_is_reported(page):
    page.set_input_files("#picture", {"name": "a.png", "mimeType": "image/png", "buffer": b"no"})
    page.locator("#message", has_text="a.png is not a picture").wait_for()


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


def test_keyboard_draws(page):
    while page.evaluate("document.activeElement.id") != "drawing":
        page.keyboard.press("Tab")
    for key, times in (("ArrowLeft", 4), (" ", 1), ("ArrowRight", 8)):
        for _ in range(times):
            page.keyboard.press(key)
    for _ in range(4):  # two arrow keys together draw diagonally
        page.keyboard.down("ArrowLeft")
        for _ in range(3):
            page.keyboard.press("ArrowDown")
            page.keyboard.up("ArrowLeft")
    assert page.locator("#pen").text_content() == "Pen down"
    page.keyboard.press(" ")
    assert page.locator("#pen").text_content() == "Pen up"
    assert settle(page) == "7"
    page.keyboard.press("c")
    assert settle(page) == ""


def test_controls_have_accessible_names_and_live_regions(page):
    output = page.locator("#digit")
    assert output.get_attribute("aria-live") == "polite"
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, select, input, canvas[tabindex]')].filter(
          (e) => !(e.textContent.trim() && e.tagName !== 'SELECT') && !e.ariaLabel
            && !e.labels?.length).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(visit, scheme):
    """Require WCAG 2.2 AA: a contrast ratio of 4.5."""
    page = visit(color_scheme=scheme)
    colours = page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          const names = ['--page', '--surface', '--text', '--quiet', '--wrong', '--accent'];
          return Object.fromEntries(names.map((n) => [n, style.getPropertyValue(n).trim()]));
        }"""
    )

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground in ("--page", "--surface"):
        for text in ("--text", "--quiet", "--wrong", "--accent"):
            dark, bright = sorted((luminance(colours[ground]), luminance(colours[text])))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
