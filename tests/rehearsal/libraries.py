"""Stub CUDA libraries: what onnxruntime's CUDA provider is linked against, on a machine without a GPU.

The provider of the installed wheel is the vendor's own code. With these libraries it loads, places nodes, allocates,
captures graphs and launches; kernels and products do nothing. So everything but the kernels is rehearsed: what the host
code of an operator refuses, in which order memory is asked for, which copies and waits a request costs, which kernels
are chosen at a compute capability, and the real texts of out-of-memory and lost-device errors.

NOTHING OF THIS IS EVIDENCE OF A GPU. Not proven: numbers, speed, kernels that fault or hang, races between streams
(everything finishes at once), the timing of asynchronous errors, cuBLAS's own memory, cuDNN (there is none).

The C sources are in cudashim/. Which libraries and versioned symbols are needed is read from the provider; functions
without a source are generated as "count the call, return success".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
SOURCES: Final = HERE / "cudashim"
HOOK: Final = HERE / "hook"
STAND_IN: Final = "CUDASHIM-NO-GPU"
"""What the device calls itself."""
PARTS: Final = {
    "libcudart.so": ("ledger.c", "memory.c", "streams.c", "kernels.c", "device.c"),
    "libcuda.so": ("driver.c",),
    "libcublas.so": ("blas.c",),
    "libcublasLt.so": ("blas.c",),
}
DEFINES: Final = {"libcublas.so": ["-DBLAS"], "libcublasLt.so": ["-DLT"]}
PRODUCT: Final = re.compile(r"cublas\w*(gemm|Gemm|geam|getr[fi]|scal|copy)\w*")
"""Functions that compute: counted as products, recorded on a capturing stream."""


def provider() -> Path | None:
    """Return the CUDA provider of the installed onnxruntime; None where there is none."""
    found = importlib.util.find_spec("onnxruntime")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "capi" / "libonnxruntime_providers_cuda.so"
    return path if path.is_file() else None


def why_not() -> str | None:
    """Return why the stubs can't be built here; None where they can."""
    if not sys.platform.startswith("linux"):
        return "the stub CUDA libraries are built for Linux only"
    missing = [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} to build the stub CUDA libraries"
    if provider() is None:
        return "needs the onnxruntime-gpu wheel, whose CUDA provider is rehearsed"
    return None


def build(folder: Path) -> None:
    """Compile the libraries into *folder*. Raises AssertionError when a symbol the provider needs is undefined."""
    path = provider()
    assert path is not None
    wanted = _needed(path)
    runtime = next(name for name in wanted if name.startswith("libcudart"))
    for library in sorted(wanted, key=lambda name: name != runtime):
        stem = library[: library.index(".so") + 3]
        sources = [SOURCES / name for name in PARTS.get(stem, ())]
        generated = folder / f"{stem}.generated.c"
        generated.write_text("")
        script = folder / f"{stem}.map"
        script.write_text(f"{library} {{ global: *; }};\n")
        command = ["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-w", *DEFINES.get(stem, [])]
        command += [f"-I{SOURCES}", *map(str, sources), str(generated), "-o", str(folder / library)]
        command += [f"-Wl,-soname,{library}", "-lpthread", "-ldl"]
        if stem != "libcuda.so":  # the driver's symbols carry no version
            command.append(f"-Wl,--version-script,{script}")
        if library != runtime:
            command.append(str(folder / runtime))
        _run(*command)
        missing = sorted(set(wanted[library]) - _exported(folder / library))
        if missing:
            generated.write_text(_PROLOGUE + "".join(map(_stub, missing)))
            _run(*command)
            assert set(wanted[library]) <= _exported(folder / library), library


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """Return a child's environment in which *folder*'s libraries are the machine's CUDA. *settings*: CUDASHIM_…

    They are loaded first, so that NVIDIA's own, from wheels or from a machine with a GPU, don't get in between.
    """
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": ":".join(sorted(map(str, folder.glob("lib*.so.*[0-9]")))),
        "PYTHONPATH": os.pathsep.join([str(HOOK), str(HERE.parents[1])]),
        "CUDASHIM": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **settings,
    }


_PROLOGUE: Final = """int cudashim_enter(const char *function);
int cudashim_product(void *handle, const char *function);
"""


def _stub(name: str) -> str:
    if PRODUCT.fullmatch(name):
        return f'int {name}(void *handle) {{ return cudashim_product(handle, "{name}"); }}\n'
    return f'int {name}(void) {{ return cudashim_enter("{name}"); }}\n'


def _needed(path: Path) -> dict[str, list[str]]:
    """Return CUDA library -> symbols. An unversioned cu* symbol is the driver's."""
    libraries = re.findall(r"NEEDED\).*\[(lib(?:cu|nv)[^\]]*)\]", _run("readelf", "-dW", str(path)))
    found: dict[str, list[str]] = {name: [] for name in libraries}
    for line in _run("readelf", "--dyn-syms", "-W", str(path)).splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] != "UND":
            continue
        name, _, version = fields[7].partition("@")
        if version in found:
            found[version].append(name)
        elif not version and re.match(r"cu[A-Z]", name):
            found["libcuda.so.1"].append(name)
    return found


def _exported(library: Path) -> set[str]:
    rows = (line.split() for line in _run("readelf", "--dyn-syms", "-W", str(library)).splitlines())
    return {row[7].partition("@")[0] for row in rows if len(row) >= 8 and row[6] not in ("UND", "Ndx")}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stderr[-2000:]}"
    return done.stdout
