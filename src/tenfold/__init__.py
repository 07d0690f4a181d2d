"""Tenfold serves language models from paged memory.

``LLM`` runs prompts from Python, ``tenfold serve`` speaks OpenAI's HTTP, and ``tenfold.core`` is the scheduler alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenfold.core.types import SamplingParams

if TYPE_CHECKING:
    from tenfold.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``LLM`` is imported on first use: the core, the simulator and the planner must not load torch."""
    if name == "LLM":
        from tenfold.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
