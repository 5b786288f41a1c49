"""scripts/run_examples.py: selection and execution of examples."""

import subprocess
import sys
from pathlib import Path

from scripts.run_examples import examples, imported

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_examples.py"
PAGE = """
```python
import math
print("chosen")
```
Text.
```python
import math
from onnx.helper import make_node
```
```sh
import math
```
"""


def test_imported():
    code = "import a.b, c as d\nfrom e.f import g\ndef h():\n    import i\n"
    assert imported(code) == {"a", "c", "e", "i"}


def test_examples_with_other_imports_are_skipped():
    assert examples(PAGE, {"math"}) == ['import math\nprint("chosen")\n']
    assert len(examples(PAGE, {"math", "onnx"})) == 2


def run(tmp_path, text, *packages):
    page = tmp_path / "page.md"
    page.write_text(text)
    command = [sys.executable, SCRIPT, page, *packages]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_selected_examples_run(tmp_path):
    done = run(tmp_path, PAGE, "math")
    assert done.stdout.splitlines()[0] == "chosen"


def test_failing_example_fails(tmp_path):
    failed = run(tmp_path, "```python\nimport math\nmath.no_such_name\n```\n", "math")
    assert failed.returncode == 1
    assert "no_such_name" in failed.stderr


def test_missing_example_raises(tmp_path):
    failed = run(tmp_path, PAGE, "onnx")
    assert failed.returncode == 1
    assert "no example that imports only onnx" in failed.stderr
