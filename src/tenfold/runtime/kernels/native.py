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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
COMPILERS = ("c++", "g++", "clang++")
INTERFACE = 1
"""What ``tenfold_interface`` answers: a library of another one would be called with wrong arguments."""
DTYPES = (torch.bfloat16, torch.float32)

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "tenfold_store": "ppiiippiipiii",
    "tenfold_attend": "piippp" + "iiiiiiii" + "pipp" + "ifi",
    "tenfold_delta_rule": "ppppppi" + "iiiii" + "piiiii" + "ppii",
    "tenfold_convolve": "piipp" + "iip" + "ppi" + "iiii",
    "tenfold_rms_norm": "piipippip" + "iiffii",
    "tenfold_rotate": "piiipppiiiii",
    "tenfold_silu_gate": "piipiii",
    "tenfold_read": "pii",
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
        function.restype = ctypes.c_int64 if name == "tenfold_read" else None
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
    parts = [SOURCE.read_bytes(), *map(str.encode, (*command, version, *FLAGS, *_openmp(), _processor()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compile(command: list[str], target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        logger.info("compiling the CPU kernels, once for this machine: %s", target)
        done = _run([*command, *FLAGS, str(SOURCE), "-o", name, *_openmp()])
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


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
    """As ``reference.store``, for a step's tokens [T, kv_heads, head_dim], each dense within a token."""
    tokens, kv_heads, head_dim = key.shape
    _cache(keys, values)
    _check(key.shape == value.shape and (kv_heads, head_dim) == tuple(keys.shape[2:]), "key, value and arena disagree")
    _check(key.dtype == value.dtype == keys.dtype, "key, value and arena differ in dtype")
    _check(places.dtype == torch.int64 and places.is_contiguous() and len(places) == tokens, "places must be int64 [T]")
    size = keys.element_size()
    key, value = _dense_rows(key), _dense_rows(value)
    library().tenfold_store(
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) * size,
        keys.stride(1) * size,
        keys.shape[1],
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0) * size,
        value.stride(0) * size,
        places.data_ptr(),
        tokens,
        kv_heads * head_dim * size,
        torch.get_num_threads(),
    )


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: np.ndarray,
    starts: np.ndarray,
    bounds: np.ndarray,
    scale: float,
) -> Tensor:
    """Causal attention of every token over its own sequence, through the block tables, in float32.

    ``query`` is [T, heads, head_dim], dense within a token; ``keys`` and ``values`` are views [pages, block_size,
    kv_heads, head_dim] that already hold the step's own tokens. ``tables`` int32 [B, blocks], ``starts`` int64 [B] and
    ``bounds`` int64 [B + 1] are those of a ``Batch``. Returns [T, heads, head_dim] in the dtype of ``query``.
    """
    tokens, heads, head_dim = query.shape
    _cache(keys, values)
    _check(head_dim == keys.shape[3] and heads % keys.shape[2] == 0, "query and arena disagree")
    if tables.dtype != np.int32 or tables.strides[1] != 4:
        tables = np.ascontiguousarray(tables, dtype=np.int32)
    query, query_bf16 = _dense_rows(query), _is_bf16(query)
    output = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
    library().tenfold_attend(
        query.data_ptr(),
        query_bf16,
        query.stride(0),
        output.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        _is_bf16(keys),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        keys.shape[1],
        heads,
        keys.shape[2],
        head_dim,
        tables.ctypes.data,
        tables.strides[0] // 4,
        _int64(starts),
        _int64(bounds),
        len(starts),
        scale,
        torch.get_num_threads(),
    )
    return output


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    bounds: np.ndarray,
    places: np.ndarray,
) -> Tensor:
    """The gated delta rule, token by token, on float32 ``states`` [slots, value_heads, key_dim, value_dim] in place.

    Tokens ``bounds[b]`` to ``bounds[b + 1]`` belong to the state at ``places[b]``. ``query`` and ``key`` are [T,
    key_heads, key_dim], ``value`` [T, value_heads, value_dim], ``beta`` [T, value_heads] of one dtype, ``decay`` [T,
    value_heads] float32. Returns a tensor like ``value``.
    """
    tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[1:]
    _check(query.shape == key.shape and len(key) == len(beta) == len(decay) == tokens, "inputs differ in length")
    _check(states.shape[1:] == (value_heads, key_dim, value_dim), "states have another shape than the inputs ask for")
    _check(states.dtype == torch.float32 and states[0].is_contiguous(), "states must be float32, dense within a slot")
    _check(query.dtype == key.dtype == value.dtype == beta.dtype, "inputs differ in dtype")
    _check(decay.dtype == torch.float32, "decay must be float32")
    query, key, value, beta, decay = (_dense_rows(x) for x in (query, key, value, beta, decay))
    output = torch.empty(tokens, value_heads, value_dim, dtype=value.dtype)
    library().tenfold_delta_rule(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        beta.data_ptr(),
        decay.data_ptr(),
        output.data_ptr(),
        _is_bf16(value),
        query.stride(0),
        key.stride(0),
        value.stride(0),
        beta.stride(0),
        decay.stride(0),
        states.data_ptr(),
        states.stride(0),
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        _int64(bounds),
        _int64(places),
        len(places),
        torch.get_num_threads(),
    )
    return output


def convolve(
    x: Tensor, weight: Tensor, tails: Tensor, bounds: np.ndarray, places: np.ndarray, *, silu: bool = False
) -> Tensor:
    """As ``convolution.convolve``, then silu of the rounded result if asked for.

    ``x`` is [T, channels], ``weight`` [channels, width], and ``tails`` a view [slots, channels, width - 1] with the
    channels innermost, which it keeps up to date. Returns [T, channels] in the dtype of ``x``.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    _check(len(weight) == channels and tails.shape[1:] == (channels, width - 1), "x, weight and tails disagree")
    _check(x.dtype == weight.dtype == tails.dtype, "x, weight and tails differ in dtype")
    _check(tails.stride(1) == 1, "tails must have their channels innermost")
    x, weight = _dense_rows(x), weight.contiguous()
    output = torch.empty(tokens, channels, dtype=x.dtype)
    library().tenfold_convolve(
        x.data_ptr(),
        _is_bf16(x),
        x.stride(0),
        weight.data_ptr(),
        tails.data_ptr(),
        tails.stride(0),
        tails.stride(2),
        output.data_ptr(),
        _int64(bounds),
        _int64(places),
        len(places),
        channels,
        width,
        silu,
        torch.get_num_threads(),
    )
    return output


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Root mean square normalisation of the last dimension of ``x`` [..., width], times ``weight`` [width] + offset.

    With a weight in the dtype of ``x`` and no offset, the normalised value is rounded to that dtype before the product,
    as in ``layers.RMSNorm``; otherwise everything up to the result is float32, as in ``qwen3_5.ZeroCentredNorm``.
    """
    return _rms_norm(x, None, weight, epsilon, offset)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``x + residual`` in the dtype of ``x``, and its ``rms_norm``."""
    return _rms_norm(x, residual, weight, epsilon, offset)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    _check(weight.shape == (width,), "weight must be [width]")
    _check(weight.dtype in (x.dtype, torch.float32), "weight must be float32 or have the dtype of x")
    rows, stride = _rows_of(x)
    output = torch.empty(x.shape, dtype=x.dtype)
    total = rows
    added, added_stride = None, 0
    if residual is not None:
        _check(residual.shape == x.shape and residual.dtype == x.dtype, "x and residual differ")
        added, added_stride = _rows_of(residual)
        total = torch.empty(x.shape, dtype=x.dtype)
    weight = weight.contiguous()
    library().tenfold_rms_norm(
        rows.data_ptr(),
        _is_bf16(x),
        stride,
        None if added is None else added.data_ptr(),
        added_stride,
        total.data_ptr(),
        weight.data_ptr(),
        _is_bf16(weight),
        output.data_ptr(),
        x.numel() // width,
        width,
        epsilon,
        offset,
        weight.dtype == x.dtype and offset == 0,
        torch.get_num_threads(),
    )
    return total, output


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """As ``layers.rotate``: ``x`` [T, heads, head_dim] by cosines and sines [T, 1, rotary_dim] of its own dtype.

    Unlike torch, rounds once, at the end. Returns a dense tensor.
    """
    cosines, sines = (angle.contiguous() for angle in angles)
    tokens, heads, head_dim = x.shape
    rotary = cosines.shape[-1]
    _check(cosines.shape == sines.shape == (tokens, 1, rotary) and rotary <= head_dim, "angles and x disagree")
    _check(cosines.dtype == sines.dtype == x.dtype, "angles and x differ in dtype")
    if x.stride(2) != 1:
        x = x.contiguous()
    output = torch.empty(tokens, heads, head_dim, dtype=x.dtype)
    library().tenfold_rotate(
        x.data_ptr(),
        _is_bf16(x),
        x.stride(0),
        x.stride(1),
        cosines.data_ptr(),
        sines.data_ptr(),
        output.data_ptr(),
        tokens,
        heads,
        head_dim,
        rotary,
        torch.get_num_threads(),
    )
    return output


def silu_gate(x: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``x`` [..., 2 * inner] is gate and up side by side. Returns [..., inner]."""
    inner = x.shape[-1] // 2
    _check(x.shape[-1] % 2 == 0, "the last dimension of x must be even")
    rows, stride = _rows_of(x)
    output = torch.empty(*x.shape[:-1], inner, dtype=x.dtype)
    library().tenfold_silu_gate(
        rows.data_ptr(),
        _is_bf16(x),
        stride,
        output.data_ptr(),
        x.numel() // (2 * inner),
        inner,
        torch.get_num_threads(),
    )
    return output


def read(x: Tensor) -> int:
    """Read a dense int64 tensor once, in order, on all threads: what benchmarks hold the kernels against."""
    _check(x.dtype == torch.int64 and x.is_contiguous(), "x must be int64 and dense")
    return int(library().tenfold_read(x.data_ptr(), x.numel(), torch.get_num_threads()))


def _cache(keys: Tensor, values: Tensor) -> None:
    _check(keys.shape == values.shape and keys.stride() == values.stride(), "keys and values must be alike")
    _check(keys.dtype == values.dtype, "keys and values differ in dtype")
    _check(keys.stride(3) == 1 and keys.stride(2) == keys.shape[3], "keys and values must be dense within a token")


def _dense_rows(x: Tensor) -> Tensor:
    """``x`` itself if everything behind its first dimension is dense, else a copy."""
    inner = x.stride()[1:]
    expected = (x.shape[2], 1) if x.dim() == 3 else (1,)
    # Strides of dimensions of one element mean nothing.
    dense = all(s == e or n == 1 for s, e, n in zip(inner, expected, x.shape[1:], strict=True))
    return x if dense else x.contiguous()


def _rows_of(x: Tensor) -> tuple[Tensor, int]:
    """``x`` [..., width] as rows at one distance from each other, and that distance; a copy if they are not."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(0) == x.stride(1) * x.shape[1]:
        return x, x.stride(1)
    return x.contiguous(), x.shape[-1]


def _is_bf16(x: Tensor) -> bool:
    _check(x.dtype in DTYPES and x.device.type == "cpu", f"no kernel for {x.dtype} on {x.device}")
    return x.dtype == torch.bfloat16


def _int64(array: np.ndarray) -> int:
    _check(array.dtype == np.int64 and array.flags.c_contiguous, "index arrays must be int64 and dense")
    return int(array.ctypes.data)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
