"""What tests of several folders use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tenfold import cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that runs ``tenfold`` with arguments: exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["tenfold", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return run
