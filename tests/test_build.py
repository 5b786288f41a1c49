"""setup.py: extensions, flags and errors, without compilation."""

import ast
import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import setuptools
import torch

from ops.core import library
from tests.ops.operators import OPERATORS

ROOT = Path(__file__).parent.parent
VARIABLES = ("USE_CUDA", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "DEBUG", "MAX_JOBS")


@pytest.fixture
def plan(monkeypatch):
    """Return a function that runs setup.py and returns its arguments of setuptools.setup.

    torch is a CUDA build without a GPU.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu130")
    monkeypatch.setattr(torch.version, "git_version", "0123456789abcdef")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
        plans = []
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: plans.append(arguments))
        runpy.run_path("setup.py")
        return plans[0]

    return run


EAGER = "ops._C_eager_2_15_0_cu130_01234567"


def extensions(plan):
    return {e.name: e for e in plan["ext_modules"]}


def flags(plan):
    return [flags for e in plan["ext_modules"] for flags in e.extra_compile_args.values()]


def error(plan, **variables):
    """Return the one-line error of setup.py."""
    with pytest.raises(SystemExit) as raised:
        plan(**variables)
    message = raised.value.code
    assert "\n" not in message
    return message


@pytest.fixture
def toolkit(tmp_path):
    """Return a function that makes a fake CUDA toolkit of a given version."""

    def make(version):
        (tmp_path / "bin").mkdir()
        (tmp_path / "lib64").mkdir()
        (tmp_path / "lib64" / "libcudart.so").touch()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}'\n"
        )
        nvcc.chmod(0o755)
        return str(tmp_path)

    return make


def test_missing_torch_raises(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert error(plan).startswith(
        "error: building lenet-ops needs PyTorch: run `pip install -r requirements.txt`"
    )


def test_old_torch_raises(plan, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert error(plan) == "error: building lenet-ops needs torch >= 2.10, this is 2.9.0"


def test_cpu_and_cuda(plan, toolkit):
    cuda = plan(CUDA_HOME=toolkit("13.2"))
    assert set(extensions(cuda)) == {"ops._C", EAGER, "ops._C_cuda"}
    both_compilers = extensions(cuda)["ops._C_cuda"].extra_compile_args
    assert all("-DUSE_CUDA" in both_compilers[name] for name in ("cxx", "nvcc"))
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"  # no GPU


@pytest.mark.parametrize(("version", "known"), [("13.0", True), ("12.8", True), ("12.6", False)])
def test_device_code_is_compressed_if_nvcc_supports_it(plan, toolkit, monkeypatch, version, known):
    monkeypatch.setattr(torch.version, "cuda", version)
    nvcc = extensions(plan(CUDA_HOME=toolkit(version)))["ops._C_cuda"].extra_compile_args["nvcc"]
    assert ("--compress-mode=size" in nvcc) == known


def test_kernels_use_the_stable_abi(plan, toolkit):
    for name, extension in extensions(plan(CUDA_HOME=toolkit("13.2"))).items():
        for options in extension.extra_compile_args.values():
            assert ("-DTORCH_TARGET_VERSION=0x020a000000000000" in options) == (name != EAGER)


def test_eager_library_is_named_after_the_build_of_torch(plan, monkeypatch):
    assert EAGER in extensions(plan(USE_CUDA="0"))
    monkeypatch.setattr(torch.version, "git_version", "fedcba9876543210")
    assert "ops._C_eager_2_15_0_cu130_fedcba98" in extensions(plan(USE_CUDA="0"))


def test_types_have_unique_names():
    """The linker keeps one of two inline functions, such as destructors, of types of one name."""
    namespace = re.compile(r"^namespace ([\w:]+)", re.MULTILINE)
    defined = re.compile(r"^(?:struct|class) (\w+)(?: final)? [:{]", re.MULTILINE)
    for pattern in ("*.h", "*.cuh"):  # CPU and CUDA
        texts = [path.read_text() for path in (ROOT / "ops").rglob(pattern)]
        names = Counter(
            (*namespace.findall(text)[:1], name) for text in texts for name in defined.findall(text)
        )
        assert len(names) > 20
        assert [name for name, count in names.items() if count > 1] == []


def test_use_cuda_0(plan, toolkit):
    assert set(extensions(plan(CUDA_HOME=toolkit("13.2"), USE_CUDA="0"))) == {"ops._C", EAGER}


def test_missing_toolkit_builds_cpu_only(plan, tmp_path, capfd):
    assert set(extensions(plan(CUDA_HOME=str(tmp_path)))) == {"ops._C", EAGER}
    assert (
        "lenet-ops: building for the CPU only: no CUDA toolkit (nvcc and libcudart) in "
        f"{tmp_path}; set CUDA_HOME to its root\n"
    ) in capfd.readouterr().err


def test_force_cuda_without_toolkit(plan, tmp_path):
    assert error(plan, CUDA_HOME=str(tmp_path), FORCE_CUDA="1", PATH="") == (
        f"error: FORCE_CUDA=1, but no CUDA toolkit (nvcc and libcudart) in {tmp_path}; "
        "set CUDA_HOME to its root"
    )


def test_force_cuda_with_a_cpu_torch(plan, toolkit, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    line = error(plan, CUDA_HOME=toolkit("13.2"), FORCE_CUDA="1")
    assert line == f"error: FORCE_CUDA=1, but torch {torch.__version__} is a CPU build"


def test_force_cuda_with_another_major_version(plan, toolkit):
    line = error(plan, CUDA_HOME=toolkit("11.8"), FORCE_CUDA="1")
    assert "is 11.8, torch was built with 13.0: the major versions must agree" in line


def test_architectures(plan, toolkit):
    plan(CUDA_HOME=toolkit("13.2"), TORCH_CUDA_ARCH_LIST="9.0")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"


def test_architectures_of_visible_gpus(plan, toolkit, monkeypatch):
    gpus = [(9, 0), (8, 6), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    plan(CUDA_HOME=toolkit("13.2"))
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.6;9.0"


@pytest.mark.parametrize("chosen", ["6.1", "5.2+PTX;9.0", "9.0 6.0"])
def test_old_architecture_raises(plan, toolkit, chosen):
    line = error(plan, CUDA_HOME=toolkit("13.2"), TORCH_CUDA_ARCH_LIST=chosen)
    assert line.startswith("error: the CUDA kernels need compute capability 7.0 or newer, not ")


@pytest.mark.parametrize(("debug", "level"), [("1", "-O0"), ("0", "-O3")])
def test_debug(plan, debug, level, toolkit):
    for f in flags(plan(CUDA_HOME=toolkit("13.2"), DEBUG=debug)):
        assert [flag for flag in f if flag.startswith("-O")] == [level]


def test_every_library_is_linked_with_the_version_script(plan, toolkit):
    cuda = plan(CUDA_HOME=toolkit("13.2"))
    for extension in cuda["ext_modules"]:
        assert extension.extra_link_args == [
            "-Wl,--exclude-libs,ALL",
            "-Wl,--version-script=ops/core/exports.map",
            "-lgcc_s",
        ]
        assert "ops/core/exports.map" in extension.depends


def error_lines():
    """Return the errors of all wrong calls in the operator table, without lists of backends."""
    lines = []
    for op in OPERATORS:
        for wrong in op.wrong:
            with pytest.raises(wrong.raises) as raised:
                wrong.call()
            line = str(raised.value).splitlines()[0].partition(" is only available for")[0]
            lines.append(f"{raised.typename}: {line}")
    return lines


def test_errors_beside_a_static_cpp_runtime(plan, tmp_path):
    """Link the compiled objects again with a C++ runtime of their own: the errors are equal."""
    compiler = shutil.which("g++")
    folders = {path.name: path for path in ROOT.glob("build/objects/ops._C*")}
    folders.pop("ops._C_cuda", None)
    if compiler is None or "ops._C" not in folders:
        pytest.skip("needs g++ and the objects of a build")
    (link_flags,) = {tuple(e.extra_link_args) for e in plan(USE_CUDA="0")["ext_modules"]}
    libraries = Path(torch.__file__).parent / "lib"
    shutil.copytree(
        ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name, folder in folders.items():
        command = [compiler, "-shared", "-static-libstdc++", "-static-libgcc", *folder.rglob("*.o")]
        command += [f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        command += [*link_flags, "-o", tmp_path / f"{name.replace('.', '/')}.abi3.so"]
        subprocess.run(command, cwd=ROOT, check=True)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import ops; "
        "from tests.test_build import error_lines; print(ops.__file__, *error_lines(), sep='\\n')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    file, *lines = result.stdout.splitlines()
    assert file == str(tmp_path / "ops" / "__init__.py")
    assert lines == error_lines()


def test_wheel_tag(plan):
    assert plan(USE_CUDA="0")["options"]["bdist_wheel"] == {"py_limited_api": "cp310"}


def test_versions_and_requirements_agree():
    setup = (ROOT / "setup.py").read_text()
    assert f"TORCH_TARGET = {library.TORCH_TARGET}" in setup
    oldest = ".".join(map(str, library.TORCH_TARGET))
    assert f"torch>={oldest}" in requirements("ops")
    pyproject = (ROOT / "pyproject.toml").read_text()
    (built_with,) = re.findall(r"^requires = (\[.+\])$", pyproject, re.M)
    assert set(ast.literal_eval(built_with)) == {*requirements("build"), f"torch>={oldest}"}


def requirements(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_requirements_txt_includes_all_extras():
    pyproject = (ROOT / "pyproject.toml").read_text()
    declared = set(re.findall(r'"(requirements/\w+\.txt)"', pyproject))
    included = {
        line.removeprefix("-r ")
        for name in ("requirements.txt", "requirements-test.txt")
        for line in (ROOT / name).read_text().splitlines()
    }
    assert declared <= included


def test_oldest_versions_are_the_lower_bounds():
    names = ("ops", "onnx", "app", "test")
    bounds = [line.split(">=") for name in names for line in requirements(name) if ">=" in line]
    pinned = dict(line.split("==") for line in requirements("oldest"))
    for name, bound in bounds:  # 1.27 and 1.27.0 are one version
        assert f"{pinned[name]}.".startswith(f"{bound}."), name


def test_every_module_is_packaged():
    pyproject = (ROOT / "pyproject.toml").read_text()
    (patterns,) = re.findall(r"^include = (\[.+\])$", pyproject, re.M)
    packages = setuptools.find_packages(ROOT, include=ast.literal_eval(patterns))
    modules = [
        path.relative_to(ROOT) for top in ("app", "ops") for path in ROOT.glob(f"{top}/**/*.py")
    ]
    assert {".".join(path.parent.parts) for path in modules} <= set(packages)


@pytest.mark.parametrize(("version", "raises"), [("2.15.0", True), ("2.16.0", False)])
def test_eager_library_is_optional_beside_an_untested_torch(
    plan, monkeypatch, capsys, version, raises
):
    monkeypatch.setattr(torch, "__version__", version)
    arguments = plan(USE_CUDA="0")
    eager, kernels = arguments["ext_modules"]

    def fail(self, ext):
        raise RuntimeError("Error compiling objects for extension")

    build = object.__new__(arguments["cmdclass"]["build_ext"])
    build.build_temp = "build"
    monkeypatch.setattr(type(build).__base__, "build_extension", fail)
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        build.build_extension(eager)
    assert (f"does not compile beside torch {version}" in capsys.readouterr().err) is not raises
    with pytest.raises(RuntimeError):
        build.build_extension(kernels)
