"""What tests of compiled programs vary: the form of the library, the dtype, shapes and threads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from support.programs import DTYPES, FORMS, library_of, threads
from tenfold.runtime.kernels import native


@pytest.fixture(params=["native", *FORMS])
def form(request, monkeypatch, tmp_path_factory) -> str:
    """Run a test on this machine's own library, and on those of lesser machines."""
    if request.param != "native":
        loaded = library_of(request.param, tmp_path_factory.getbasetemp() / "forms")
        monkeypatch.setattr(native, "library", lambda: loaded)
    return request.param


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=range(3))
def rng(request) -> Iterator[random.Random]:
    """A generator of shapes; torch's is seeded as well, and each seed has its number of threads."""
    torch.manual_seed(request.param)
    with threads((1, 2, 5)[request.param]):
        yield random.Random(request.param)
