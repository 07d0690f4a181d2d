"""Which models the compiled kernels take, what is said where they cannot be used, and how the library comes to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import CONFIGS, hybrid
from support.programs import CPU, needs_compiler
from tenfold.errors import ModelError
from tenfold.models.quantise import Format, dequantise, quantise
from tenfold.runtime.kernels import QUANTISATIONS, native, obstacle, packing

BLOCK = 16


def config(**changes: Any) -> Any:
    """A small Llama's, which the kernels can run, with some changes."""
    made = CONFIGS["llama"]()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def choose(dtype: torch.dtype = torch.float32, device: torch.device = CPU, block: int = BLOCK, **options: Any) -> Any:
    return packing(config(), dtype, device, block, **options)


@pytest.mark.parametrize(
    ("model", "dtype", "device", "block", "reason"),
    [
        (config(), torch.float16, CPU, 16, r"on a CPU in bfloat16 or float32, not on cpu in torch\.float16"),
        (config(), torch.float32, torch.device("meta"), 16, "not on meta"),
        (config(), torch.float32, CPU, 24, "a multiple of 16 tokens, not 24"),
        (config(head_dim=24), torch.float32, CPU, 16, "a multiple of 16 features, not 24"),
        (config(head_dim=1040), torch.float32, CPU, 16, "a multiple of 16 features, not 1040"),
        (config(head_dim=None, hidden_size=60), torch.float32, CPU, 16, "features, not 10"),
        (config(hidden_act="gelu"), torch.float32, CPU, 16, "'gelu' is not among silu, gelu_pytorch_tanh, relu"),
        (config(hidden_size=97), torch.bfloat16, CPU, 16, "even widths"),
        (config(intermediate_size=97), torch.bfloat16, CPU, 16, "even widths"),
        (hybrid(1, 1, 32, 33), torch.bfloat16, CPU, 16, "even widths"),
        (hybrid(1, 1, 32, 32, hidden_act="relu"), torch.bfloat16, CPU, 16, "followed by silu, not by 'relu'"),
    ],
)
def test_obstacles(model: Any, dtype: torch.dtype, device: torch.device, block: int, reason: str, caplog) -> None:
    """The kernels are refused where they were asked for; otherwise a CPU's user is warned, and nobody else."""
    assert obstacle(config(), torch.bfloat16, CPU, 64) is None
    for options in ({"choice": "native"}, {"quantize": "int8"}):
        with pytest.raises(ModelError, match=f"the native kernels cannot run this model: .*{reason}"):
            packing(model, dtype, device, block, **options)
    assert not caplog.records
    assert packing(model, dtype, device, block) is None
    assert len(caplog.records) == (1 if device.type == "cpu" else 0)
    assert "the slow reference is" in caplog.text or device.type != "cpu"


def test_choices(caplog) -> None:
    with pytest.raises(ModelError, match="kernels must be one of auto, reference, native, not 'fastest'"):
        choose(choice="fastest")
    with pytest.raises(ModelError, match="quantize must be one of int8, int8-groups, int4, gguf, not 'int2'"):
        choose(quantize="int2")
    with pytest.raises(ModelError, match="leave out kernels='reference'"):
        choose(choice="reference", quantize="int8")
    assert choose(choice="reference") is None
    assert not caplog.records, "what was asked for needs no warning"


@needs_compiler
@pytest.mark.parametrize("quantize", [None, *QUANTISATIONS])
@pytest.mark.parametrize("choice", ["auto", "native"])
def test_what_packs(choice: str, quantize: str | None) -> None:
    """Weights that a format cannot hold stay as they are."""
    pack = choose(torch.bfloat16, choice=choice, quantize=quantize)
    plain = pack(torch.randn(64, 62).bfloat16(), None, True)
    assert (plain.format, plain.outputs, plain.inputs, plain.gated) == (Format.BFLOAT16, 32, 62, True)
    packed = pack(torch.randn(64, 128).bfloat16(), torch.randn(64).bfloat16(), False)
    assert packed.format == (Format.BFLOAT16 if quantize is None else QUANTISATIONS[quantize])
    assert packed.bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("format", "levels"), [(Format.INT8, 127), (Format.INT8_GROUPS, 127), (Format.INT4_GROUPS, 7.5)]
)
def test_quantise(format: Format, levels: float) -> None:
    """Each weight moves by half a step at most, of its own output or group; zeros stay zeros."""
    weight = torch.randn(20, 96) * torch.logspace(-3, 3, 20)[:, None]
    weight[3] = 0
    found = dequantise(quantise(weight, format))
    groups = weight.view(20, 1 if format is Format.INT8 else 3, -1)
    step = groups.abs().amax(-1, keepdim=True) / levels
    assert ((found.view_as(groups) - groups).abs() <= 0.501 * step).all()
    assert not found[3].any()


# How the library comes to be


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch):
    """A process that has not looked for the kernels yet, with a cache of its own."""
    monkeypatch.setattr(native, "user_cache_path", lambda _: tmp_path)
    for cached in (native.library, native.available):
        cached.cache_clear()
    yield tmp_path
    for cached in (native.library, native.available):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("cxx", "reason"), [("false", "did not compile"), ("no-such-compiler", "no no-such-compiler.*was found")]
)
def test_without_a_compiler(cxx: str, reason: str, unloaded: Path, monkeypatch, caplog) -> None:
    """``auto`` warns once for each model and goes on; what was asked for is refused."""
    monkeypatch.setenv("CXX", cxx)
    assert choose() is None
    (warning,) = caplog.records
    assert "install g++" in warning.getMessage() and "CXX" in warning.getMessage()
    for options in ({"choice": "native"}, {"quantize": "int4"}):
        with pytest.raises(ModelError, match=reason):
            choose(**options)
    assert not native.available() and not native.available()
    assert len(caplog.records) == 2, "and it is said once for all that ask whether there are kernels"
    assert not list(unloaded.rglob("*.so")), "nothing half-made is left behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(native.NativeError, match="make it writable"):
        native.build(tmp_path / "kernels")


@needs_compiler
def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").touch()
    with pytest.raises(native.NativeError, match=r"cannot be kept in .*make it writable"):
        native.build(tmp_path / "kernels")


@needs_compiler
def test_a_damaged_library(unloaded: Path, monkeypatch) -> None:
    """It is not loaded, and the message names it."""
    (unloaded / "kernels").mkdir()
    (unloaded / "kernels" / f"native-{native.key(native.compiler())}.so").write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(native.NativeError, match=r"native-.*\.so cannot be loaded .*: delete it"):
        native.library()


@needs_compiler
def test_a_library_of_another_interface(monkeypatch) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    with pytest.raises(native.NativeError, match="another interface"):
        native.library.__wrapped__()


@needs_compiler
def test_compiled_once(tmp_path: Path, monkeypatch) -> None:
    fast(monkeypatch)
    path = native.build(tmp_path)
    assert only_libraries(tmp_path)
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.build(tmp_path) == path
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O2"))
    monkeypatch.setattr(native, "_compile", lambda command, target: target.touch())
    assert native.build(tmp_path) != path, "other flags are another library"


def fast(monkeypatch) -> None:
    """Compile without optimisation."""
    monkeypatch.setattr(native, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS))


def only_libraries(folder: Path) -> bool:
    """One library, and perhaps the lock that it was compiled under."""
    return sorted(path.suffix for path in folder.iterdir()) in ([".lock", ".so"], [".so"])


@needs_compiler
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    wrapper = tmp_path / "counting"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.5\nexec {native.compiler()[0]} "$@"\n')
    wrapper.chmod(0o755)
    code = (
        "import sys, ctypes, pathlib, torch; from tenfold.runtime.kernels import native\n"
        "native.FLAGS = tuple('-O0' if flag == '-O3' else flag for flag in native.FLAGS)\n"
        "print(ctypes.CDLL(str(native.build(pathlib.Path(sys.argv[1])))).tenfold_interface())"
    )
    environment = {**os.environ, "CXX": str(wrapper)}
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [str(native.INTERFACE)] * 2
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum(native.ON_ALL_CORES in call for call in calls) == 1, "one compiled, the other waited"
    assert only_libraries(tmp_path / "cache")


@needs_compiler
def test_one_openmp_runtime() -> None:
    native.library()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rpartition("/")[2]}
    assert len(runtimes) == 1, runtimes
