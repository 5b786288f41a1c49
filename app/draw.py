"""Command: draw digits on a page in the browser."""

from app.config.cli import hydra_main
from app.config.errors import UserError
from app.config.schema import DrawConfig


@hydra_main("draw", DrawConfig)
def main(cfg: DrawConfig) -> None:
    """Serve a page to draw digits on; the trained networks predict them."""
    try:
        from app.web.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "websockets"):
            raise
        raise UserError(f"{error.name} is missing: pip install 'lenet-ops[web]'") from error

    serve(cfg)


if __name__ == "__main__":
    main()
