"""Model families, their weights, and the way from a name to a loaded model.

Importing this package loads no torch: the command line and the planner look families up before they decide to load one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tenfold.errors import ModelError

if TYPE_CHECKING:
    from tenfold.models.base import ModelFamily

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "tenfold.models.llama:Llama",
    "MistralForCausalLM": "tenfold.models.mistral:Mistral",
    "Qwen2ForCausalLM": "tenfold.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "tenfold.models.qwen3:Qwen3",
    "Qwen3_5ForCausalLM": "tenfold.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "tenfold.models.qwen3_5:Qwen3_5",
}
"""Architecture name, as ``config.json`` spells it, to the ``module:Class`` that runs it."""


def family(architecture: str) -> ModelFamily:
    """Return the class that runs ``architecture``, importing its module (and with it torch).

    Raises ModelError, listing the known architectures, when there is none.
    """
    target = FAMILIES.get(architecture)
    if target is None:
        raise ModelError(f"architecture {architecture!r} is not supported; known are {', '.join(sorted(FAMILIES))}")
    module, _, name = target.partition(":")
    found: ModelFamily = getattr(import_module(module), name)
    return found
