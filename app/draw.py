"""Command: draw digits on a page in the browser."""

from app.config.cli import command
from app.config.schema import DrawConfig


@command("draw", DrawConfig)
def main(cfg: DrawConfig) -> None:
    """Serve a page to draw digits on; the trained networks predict them."""
    from app.web.server import serve  # late: it is slow

    serve(cfg)


if __name__ == "__main__":
    main()
