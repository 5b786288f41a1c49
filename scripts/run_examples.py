"""Run the Python examples of a Markdown file that import only the named packages.

Usage: python scripts/run_examples.py README.md torch ops
"""

import ast
import re
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.+?)^```", re.MULTILINE | re.DOTALL)


def imported(code: str) -> set[str]:
    """Return the top-level packages that `code` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def examples(text: str, packages: set[str]) -> list[str]:
    """Return the examples in `text` that import only `packages`."""
    return [code for code in _BLOCK.findall(text) if imported(code) <= packages]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: run_examples.py FILE PACKAGE...")
    found = examples(Path(sys.argv[1]).read_text(encoding="utf-8"), set(sys.argv[2:]))
    if not found:
        sys.exit(f"error: {sys.argv[1]} has no example that imports only {', '.join(sys.argv[2:])}")
    for example in found:
        exec(example, {})
    print(f"{len(found)} of the examples in {sys.argv[1]} run")
