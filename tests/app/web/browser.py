"""Headless Chromium of the system, driven by Playwright."""

import os
import shutil
from contextlib import contextmanager
from importlib.util import find_spec

from tests.app.web.strokes import DIGITS

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing():
    """Return why browser tests cannot run, or None."""
    if find_spec("playwright") is None:
        return "no Playwright: pip install playwright"
    return None if executable() else "no Chromium: apt-get install chromium"


def executable():
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        yield browser
        browser.close()


def open_page(context, address, faults):
    """Open `address`; append requests to other hosts and console errors to `faults`."""
    page = context.new_page()
    page.on(
        "request", lambda r: r.url.startswith((address, "data:", "blob:")) or faults.append(r.url)
    )
    page.on("console", lambda m: m.type == "error" and faults.append(m.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    return page


def draw(page, digit, strokes=DIGITS):
    """Draw a digit with the mouse."""
    box = page.locator("#drawing").bounding_box()
    for points in strokes[digit]:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place)
        page.mouse.up()


def settle(page):
    """Wait for the prediction of the current drawing, and return it."""
    page.wait_for_function(
        "() => document.getElementById('digit').dataset.version === document.body.dataset.version"
    )
    return page.locator("#digit").text_content()
