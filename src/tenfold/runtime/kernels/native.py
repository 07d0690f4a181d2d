"""The CPU kernels of ``native.cpp``: compiled once per machine, loaded once per process, called on torch tensors.

The library shares torch's own OpenMP runtime, so its threads are torch's pool, ``torch.get_num_threads()`` of them.
Every function checks what the C interface takes on trust: dtypes, dense inner dimensions, shapes that belong together.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

from tenfold.models.quantise import GROUP, Format, Quantised

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
ON_ALL_CORES = "-flto=auto"
"""Makes GCC optimise several parts of the library at once, which saves two cores 40% of the time."""
COMPILERS = ("c++", "g++", "clang++")
INTERFACE = 3
"""What ``tenfold_interface`` answers: a library of another one would be called with wrong arguments."""
DTYPES = (torch.bfloat16, torch.float32)

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "tenfold_panel": "",
    "tenfold_size": "i",
    "tenfold_run": "pipiip",
    "tenfold_pack": "ppiiiii",
    "tenfold_pack_bytes": "pppppp" + "iiiii",
    "tenfold_argmax": "piiipi",
    "tenfold_large_pages": "pi",
    "tenfold_read": "pii",
    "tenfold_multiply": "iii",
}


class NativeError(RuntimeError):
    """The kernels cannot be compiled or loaded on this machine; the message says why, and what would help."""


@functools.cache
def library() -> Any:
    """The loaded library, compiled first where this machine's cache does not have it. Raises NativeError."""
    path = build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded ({error}): delete it, and it will be compiled anew") from error
    loaded.tenfold_interface.restype = ctypes.c_int64
    if loaded.tenfold_interface() != INTERFACE:
        raise NativeError(f"{path} has another interface than this version of Tenfold calls: delete it")
    for name, signature in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[letter] for letter in signature]
        function.restype = ctypes.c_int64
    return loaded


@functools.cache
def available() -> bool:
    """Whether the kernels can be used. The first time that they cannot, a warning says why."""
    try:
        library()
    except NativeError as error:
        logger.warning("the fast CPU kernels are not used, and the slow reference is: %s", error)
        return False
    return True


def build(cache: Path | None = None) -> Path:
    """Return the library's path in ``cache``, the user's own by default, compiling it if it is not there.

    Safe in several processes at once: one compiles and the others wait. Raises NativeError.
    """
    folder = cache if cache is not None else user_cache_path("tenfold") / "kernels"
    command = compiler()
    target = folder / f"native-{key(command)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "native.lock"):
            if not target.exists():
                _compile(command, target)
    except OSError as error:
        raise NativeError(f"the compiled kernels cannot be kept in {folder} ({error}): make it writable") from error
    return target


def compiler() -> list[str]:
    """The command of the C++ compiler: that of the environment variable CXX, or the first found. Raises NativeError."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    wanted = f"{chosen[0]} (from CXX)" if chosen else "C++ compiler"
    raise NativeError(f"no {wanted} was found: install g++ (Debian and Ubuntu: apt install g++), or set CXX to one")


def key(command: list[str]) -> str:
    """What the library depends on, as a name: source, flags, compiler, processor and torch's OpenMP runtime."""
    version = _run([*command, "--version"]).stdout
    parts = [SOURCE.read_bytes(), *map(str.encode, (*command, version, *FLAGS, ON_ALL_CORES, *_openmp(), _processor()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(command: list[str], target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        logger.info("compiling the CPU kernels, once for this machine: %s", target)
        arguments = [*FLAGS, str(SOURCE), "-o", name, *_openmp()]
        done = _run([*command, ON_ALL_CORES, *arguments])
        if done.returncode != 0:  # what it takes may not be installed
            done = _run([*command, *arguments])
        if done.returncode != 0 or Path(name).stat().st_size == 0:
            reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
            raise NativeError(
                f"{shlex.join(command)} did not compile them (status {done.returncode}: {reason}): "
                "install g++ 11 or newer (Debian and Ubuntu: apt install g++), or set CXX to it"
            )
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{shlex.join(command)} cannot be run ({error}): set CXX to a C++ compiler") from error


@functools.cache
def _openmp() -> tuple[str, ...]:
    """Linker arguments that make the library use the OpenMP runtime that torch has loaded, whatever its file is called.

    Some builds of torch bring a renamed libgomp: by its plain name a second one, with threads of its own, would load.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ()
    files = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if "gomp" in line}
    if len(files) != 1 or Path(next(iter(files))).name == "libgomp.so.1":
        return ()
    return ("-Wl,--as-needed", *files)


@functools.cache
def _processor() -> str:
    """The processor's name and features: ``-march=native`` means them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    features = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(dict.fromkeys(features))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] in the layout that the kernels multiply in, and its float32 bias [outputs] if any.

    Gated weights are those of ``activation(gate) * up``; ``outputs`` then counts one of the halves. ``scales`` and
    ``least`` are float32, of quantised weights only: see ``native.cpp``.
    """

    format: Format
    outputs: int
    inputs: int
    gated: bool
    data: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    least: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as it is kept, scales included."""
        return sum(part.nbytes for part in (self.data, self.scales, self.least) if part is not None)


def pack(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PackedWeight:
    """Pack a bfloat16 or float32 ``weight`` [outputs, inputs]; ``gated`` ones have the gate's rows first.

    Raises ValueError for a dtype or a shape that the kernels do not take (see ``obstacle``).
    """
    bf16 = weight.dtype == torch.bfloat16
    outputs, inputs = _shape(weight, gated)
    if weight.dtype not in DTYPES or (bf16 and inputs % 2):
        raise ValueError(f"no kernel multiplies {weight.dtype} with {inputs} inputs")
    weight = weight.contiguous()
    data = torch.empty(_padded(outputs, gated) * inputs, dtype=weight.dtype)
    large_pages(data)
    library().tenfold_pack(weight.data_ptr(), data.data_ptr(), bf16, outputs, inputs, gated, torch.get_num_threads())
    return PackedWeight(Format.BFLOAT16 if bf16 else Format.FLOAT, outputs, inputs, gated, data, _float(bias))


def pack_quantised(weight: Quantised, bias: Tensor | None = None, *, gated: bool = False) -> PackedWeight:
    """Pack a quantised weight. Raises ValueError for a number of inputs that its format does not take."""
    outputs, inputs = _shape(weight.values, gated)
    if inputs % (4 if weight.format is Format.INT8 else GROUP):
        raise ValueError(f"{weight.format.name} weights cannot have {inputs} inputs")
    padded = _padded(outputs, gated)
    data = torch.empty(padded * inputs // (2 if weight.format is Format.INT4_GROUPS else 1), dtype=torch.uint8)
    large_pages(data)
    scales = torch.empty(padded * weight.scales.shape[1])
    least = None if weight.least is None else torch.empty_like(scales)
    parts = [part.contiguous() for part in (weight.values, weight.scales)]
    given = None if weight.least is None else weight.least.contiguous()
    library().tenfold_pack_bytes(
        parts[0].data_ptr(),
        parts[1].data_ptr(),
        None if given is None else given.data_ptr(),
        data.data_ptr(),
        scales.data_ptr(),
        None if least is None else least.data_ptr(),
        weight.format,
        outputs,
        inputs,
        gated,
        torch.get_num_threads(),
    )
    return PackedWeight(weight.format, outputs, inputs, gated, data, _float(bias), scales, least)


def argmax(x: Tensor) -> Tensor:
    """The first of the largest of each row of float32 [rows, columns], dense in a row; int64 [rows]."""
    _check(x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1, "x must be float32 [rows, columns]")
    result = torch.empty(len(x), dtype=torch.int64)
    library().tenfold_argmax(x.data_ptr(), x.stride(0), len(x), x.shape[1], result.data_ptr(), torch.get_num_threads())
    return result


def large_pages(x: Tensor) -> None:
    """Ask the system to back a dense tensor by large pages, where it has them; its contents stay."""
    library().tenfold_large_pages(x.data_ptr(), x.nbytes)


def multiply(format: Format, rounds: int) -> int:
    """Multiply in registers on all threads; returns operations done, a multiplication and an addition being two."""
    return int(library().tenfold_multiply(format, rounds, torch.get_num_threads()))


def read(x: Tensor) -> int:
    """Read a dense int64 tensor once, in order, on all threads: what benchmarks hold the kernels against."""
    _check(x.dtype == torch.int64 and x.is_contiguous(), "x must be int64 and dense")
    return int(library().tenfold_read(x.data_ptr(), x.numel(), torch.get_num_threads()))


def _shape(weight: Tensor, gated: bool) -> tuple[int, int]:
    rows, inputs = weight.shape
    _check(not gated or rows % 2 == 0, "a gated weight has an even number of rows")
    return rows // 2 if gated else rows, inputs


def _padded(outputs: int, gated: bool) -> int:
    """Columns that ``outputs`` take in the packed weight."""
    panel = int(library().tenfold_panel())
    return -(-outputs // (panel // 2)) * panel if gated else -(-outputs // panel) * panel


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
