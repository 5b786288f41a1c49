"""Runs the parsers of all commands without PyTorch; prints a line for each wrong answer.

scripts/check_parsers.sh starts it in other versions of Python. With the argument --once, only the
first command of each case.
"""

import contextlib
import importlib
import io
import platform
import sys
import time
from importlib.metadata import version

COMMANDS = ("train", "predict", "export_onnx", "export_pt2", "draw", "report")
# Commands, arguments, the exit code, and a part of the output.
CASES = [
    (COMMANDS, "--help", 0, "outputs"),
    (COMMANDS, "--version", 0, "lenet-ops "),
    (COMMANDS, "--bogus", 2, "error: unrecognized arguments: --bogus (--help shows the options)"),
    (COMMANDS, "--cfg=job", 0, "outputs: outputs"),
    (COMMANDS[:-1], "outputs=a", 2, " is missing: "),  # a correct command imports torch
    (COMMANDS, "bogus=1", 2, "error: bogus: unknown key, choose from "),
    (["draw"], "outputs=", 2, "error: outputs=: Input should not be blank"),
    (["train"], "-h", 0, "model: lenet, lenet_depthwise, "),
    (["train"], "model.act=gelu -c job seed=3", 0, "act: gelu"),
    (["train"], "model=foo", 2, "error: model=foo: choose from lenet, "),
    (["train"], "epochs=5", 2, "did you mean trainer.epochs?"),
    (["train"], "-m seed=1,2", 2, " is missing: "),
    (["train"], "-m seed=1,-2", 2, "error: seed=-2: Input should be greater than or equal to 0"),
    (["train"], "-m -c job", 2, "not allowed with argument"),
]


def call(command: str, arguments: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and output."""
    sys.argv = ["-m", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            importlib.import_module(f"app.{command}").main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, output.getvalue()


def main() -> int:
    """Check all cases; return the number of wrong answers."""
    begin, wrong, count = time.perf_counter(), 0, 0
    commands_of_a_case = 1 if "--once" in sys.argv else len(COMMANDS)
    for commands, arguments, expected, part in CASES:
        for command in commands[:commands_of_a_case]:
            code, output = call(command, arguments.split())
            count += 1
            if code != expected or part not in output or "Traceback" in output:
                wrong += 1
                print(f"app.{command} {arguments}: exit code {code} for {expected}:\n{output}")
    seconds = time.perf_counter() - begin
    versions = f"hydra-core {version('hydra-core')}, pydantic {version('pydantic')}"
    print(
        f"Python {platform.python_version()} ({sys.platform}), {versions}: "
        f"{count - wrong} of {count} command lines right, {seconds:.1f} s"
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
