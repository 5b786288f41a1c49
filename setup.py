"""Compile the C++ and CUDA sources under ops/ into libraries beside ops/__init__.py.

    _C                  schemas and CPU kernels; for any torch >= 2.10.
    _C_cuda             CUDA kernels; for any torch >= 2.10.
    _C_eager_BUILD      autograd, autocast and calls in C++; for this build of torch only.

Environment variables:
    USE_CUDA=0             build for the CPU only.
    FORCE_CUDA=1           fail without a CUDA toolkit, instead of building for the CPU only.
    TORCH_CUDA_ARCH_LIST   GPU architectures, such as "9.0" (default: those of the visible GPUs;
                           without a GPU "8.0;9.0+PTX").
    CUDA_HOME              the CUDA toolkit (default: that of nvcc on PATH, or /usr/local/cuda).
    DEBUG=1                no optimisation, debug symbols.
    ONLY_EAGER=1           build only _C_eager, to add to a wheel (scripts/wheel.sh).
    MAX_JOBS               parallel compiler processes.
"""

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from setuptools import Extension, setup

TORCH_TARGET = (2, 10)  # the oldest torch that the libraries support
TORCH_TESTED = (2, 15)  # the newest that _C_eager is known to compile beside
PYTHON_TARGET = "cp310"
DEFAULT_ARCHS = "8.0;9.0+PTX"
OLDEST_ARCH = (7, 0)


def flag(name: str) -> bool:
    """Return whether an environment variable is set to anything but 0, false, off or no."""
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")


try:
    import torch
except ImportError:
    sys.exit(
        "error: building lenet-ops needs PyTorch: run `pip install -r requirements.txt`, then "
        "`pip install --no-build-isolation -e .` in the same environment"
    )
torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if torch_version < TORCH_TARGET:
    sys.exit(f"error: building lenet-ops needs torch >= 2.10, this is {torch.__version__}")


def has_runtime(root: Path) -> bool:
    """Return whether the toolkit in `root` has the CUDA runtime library."""
    return any(True for lib in ("lib64", "lib") for _ in (root / lib).glob("libcudart.so*"))


def toolkit() -> tuple[Path, tuple[int, int]]:
    """Return the CUDA toolkit's root and version; raise LookupError if there is none."""
    nvcc = shutil.which("nvcc")
    candidates = [Path(nvcc).resolve().parent.parent] if nvcc else []
    candidates.append(Path("/usr/local/cuda"))
    if nvcc and not has_runtime(candidates[0]):
        # nvcc is a wrapper script: get the toolkit's root from TOP= in the compiler's dry run.
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull], capture_output=True, text=True
        )
        if top := re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE):
            candidates.insert(0, Path(top.group(1)).resolve())
    if chosen := os.environ.get("CUDA_HOME"):
        candidates = [Path(chosen)]
    for root in candidates:
        compiler = root / "bin" / "nvcc"
        if compiler.exists() and has_runtime(root):
            text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
            if version := re.search(r"release (\d+)\.(\d+)", text):
                return root, (int(version.group(1)), int(version.group(2)))
    raise LookupError(
        f"no CUDA toolkit (nvcc and libcudart) in {', '.join(map(str, candidates))}; "
        "set CUDA_HOME to its root"
    )


def cuda_toolkit() -> tuple[Path, tuple[int, int]] | None:
    """Return the toolkit to build the CUDA kernels with, or None for a CPU-only build."""
    if "USE_CUDA" in os.environ and not flag("USE_CUDA"):
        return None
    try:
        if torch.version.cuda is None:
            raise LookupError(f"torch {torch.__version__} is a CPU build")
        root, version = toolkit()
        if version[0] != int(torch.version.cuda.split(".")[0]):
            raise LookupError(
                f"the CUDA toolkit in {root} is {version[0]}.{version[1]}, torch was built with "
                f"{torch.version.cuda}: the major versions must agree (set CUDA_HOME to another)"
            )
    except LookupError as reason:
        if flag("FORCE_CUDA"):
            sys.exit(f"error: FORCE_CUDA=1, but {reason}")
        print(f"lenet-ops: building for the CPU only: {reason}", file=sys.stderr)
        return None
    return root, version


def architectures() -> str:
    """Return the GPU architectures to compile for; exit if one is too old."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not chosen and torch.cuda.is_available():
        gpus = {torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count())}
        chosen = ";".join(f"{major}.{minor}" for major, minor in sorted(gpus))
    chosen = chosen or DEFAULT_ARCHS
    for major, minor in re.findall(r"(\d+)\.(\d+)", chosen):
        if (int(major), int(minor)) < OLDEST_ARCH:
            sys.exit(
                "error: the CUDA kernels need compute capability 7.0 or newer, "
                f"not {major}.{minor}: set TORCH_CUDA_ARCH_LIST to newer ones, or USE_CUDA=0 for "
                "CPU kernels only"
            )
    return chosen


cuda = cuda_toolkit()
if cuda:
    os.environ["CUDA_HOME"] = str(cuda[0])  # read by torch.utils.cpp_extension when it is imported
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

target = f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
optimise = ["-O0", "-g"] if flag("DEBUG") else ["-O3"]
eager_flags = [
    *([] if flag("DEBUG") else ["-g0"]),  # overrides -g in Python's flags
    f"-ffile-prefix-map={Path.cwd()}/=",  # relative paths in error messages
    *optimise,
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-psabi",  # no vector is passed to a call: all are inlined
]
error_macros = ["-include", "core/compat.h"]  # before PyTorch's headers
cxx_flags = [
    *eager_flags,
    target,
    *error_macros,
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
nvcc_flags = [target, *error_macros, *optimise, "-std=c++17", "-DUSE_CUDA", "--threads=2"]
if cuda and cuda[1] >= (12, 8):
    nvcc_flags.append("--compress-mode=size")

# A statically linked C++ runtime exports nothing, because PyTorch has its own copy. The unwinder is
# shared, because exceptions cross libraries.
EXPORTS = "ops/core/exports.map"
link_flags = ["-Wl,--exclude-libs,ALL", f"-Wl,--version-script={EXPORTS}", "-lgcc_s"]

# Two libraries in parallel: all cores stay busy during the last file of one.
LIBRARIES_AT_ONCE = None if os.environ.get("MAX_JOBS") else 2
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))


class Build(BuildExtension):
    """Keep compiled objects between builds; remove libraries that are no longer built."""

    def finalize_options(self) -> None:
        """Keep the objects in build/objects: setuptools compiles editable installations in /tmp."""
        super().finalize_options()
        self.build_temp = "build/objects"
        self.parallel = LIBRARIES_AT_ONCE

    def build_extension(self, ext: Extension) -> None:
        """Build a library in its own folder, with its own ninja file."""
        command = copy.copy(self)
        command.build_temp = f"{self.build_temp}/{ext.name}"
        try:
            super(Build, command).build_extension(ext)
        except RuntimeError as error:  # of ninja
            if not ext.optional:
                raise
            print(
                f"lenet-ops: {ext.name} does not compile beside torch {torch.__version__} and is "
                f"left out; calls and autograd are slower without it ({error})",
                file=sys.stderr,
            )

    def run(self) -> None:
        """Build, then remove the libraries of earlier builds."""
        super().run()
        if flag("ONLY_EAGER"):
            return
        made = {extension.name.removeprefix("ops.") for extension in self.extensions}
        folders = [Path(self.build_lib) / "ops"]
        if self.inplace or self.editable_mode:  # a wheel leaves the sources alone
            folders.append(Path("ops"))
        for library in (path for folder in folders for path in folder.glob("_C*.so")):
            if library.name.split(".")[0] not in made:
                library.unlink()


def extension(
    kind: Callable[..., Extension],
    name: str,
    sources: Iterable[Path],
    libraries: Sequence[str] = (),
    **flags: list[str],
) -> Extension:
    """Return one library; sources in cpu/ folders, the slowest to compile, come first."""
    ops = Path("ops")
    return kind(
        name,
        [str(path) for path in sorted(sources, key=lambda path: (path.parent.name != "cpu", path))],
        include_dirs=[str(ops.resolve())],
        libraries=list(libraries),
        depends=[*sorted(map(str, [*ops.rglob("*.h"), *ops.rglob("*.cuh")])), EXPORTS],
        extra_compile_args=flags,
        extra_link_args=link_flags,
        py_limited_api=True,
    )


EAGER = Path("ops/core/eager")
GLIBC = Path("ops/core/glibc.cpp")  # in every library
cpu_sources = [path for path in Path("ops").rglob("*.cpp") if path.parent != EAGER]
build = re.sub(r"\W", "_", f"{torch.__version__}_{torch.version.git_version[:8]}")
extensions = [
    extension(
        CppExtension,
        f"ops._C_eager_{build}",
        [*EAGER.glob("*.cpp"), GLIBC],
        libraries=["torch_python"],
        cxx=eager_flags,
    ),
    extension(CppExtension, "ops._C", cpu_sources, cxx=cxx_flags),
]
extensions[0].optional = torch_version > TORCH_TESTED
if flag("ONLY_EAGER"):
    del extensions[1:]
elif cuda:
    extensions.append(
        extension(
            CUDAExtension,
            "ops._C_cuda",
            [*Path("ops").rglob("*.cu"), GLIBC],
            cxx=[*cxx_flags, "-DUSE_CUDA"],
            nvcc=nvcc_flags,
        )
    )

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": PYTHON_TARGET}},
)
