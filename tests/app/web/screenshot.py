"""Take the README's picture: python -m tests.app.web.screenshot [OUTPUTS [PICTURE]]."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.app.web.browser import chromium, draw, open_page, settle
from tests.app.web.conftest import Server
from tests.networks import ROOT

SIZE = {"width": 1200, "height": 900}


def main(outputs="outputs", picture=ROOT / "docs" / "draw.png", *settings):
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        server = Server(Path(outputs).resolve(), Path(folder) / "stderr", *settings)
        page = open_page(browser.new_context(viewport=SIZE), server.address, [])
        draw(page, "5")
        settle(page)
        content = page.screenshot(full_page=True)
        server.stop()
    colours = Image.open(io.BytesIO(content)).convert("RGB").quantize(128, dither=0)
    colours.save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
