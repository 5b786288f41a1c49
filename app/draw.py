"""Command: draw digits on a page in the browser."""

from app.config.cli import run_command
from app.config.schema import DrawConfig


def main() -> None:
    """Serve a page to draw digits on; the trained networks predict them."""
    run_command("draw", DrawConfig, task)


def task(cfg: DrawConfig) -> None:
    """Import what the command needs, and run it."""
    from app.web.server import serve

    serve(cfg)


if __name__ == "__main__":
    main()
