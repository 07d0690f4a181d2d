"""The seam between models and the runtime: what a model may know about one forward pass, and what it gives back."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tenfold.models.weights import Weights


class Step(Protocol):
    """One forward pass over the tokens of every sequence of a step, decodes and prefill chunks mixed.

    The runtime implements it. A model sees neither blocks nor tables: it hands keys and values over and gets the
    attention's result back.
    """

    @property
    def token_ids(self) -> Tensor:
        """int64 [T]: the tokens of every sequence, one after the other."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]: the position of each token in its own sequence, from 0."""

    @property
    def sampled(self) -> Tensor:
        """int64 [S]: indices into T of the rows whose logits are wanted."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store ``key`` and ``value`` at the tokens' places, then attend causally within each token's own sequence.

        ``layer`` counts the attention layers from 0. ``query`` is [T, heads, head_dim], ``key`` and ``value`` are
        [T, kv_heads, head_dim], all in the compute dtype and already rotated. Returns [T, heads, head_dim].
        """


class Model(Protocol):
    """A loaded model. It keeps no state between steps: all of that lives with the runtime, behind ``Step``."""

    def forward(self, step: Step) -> Tensor:
        """Return the logits [S, vocabulary] of the sampled rows, in the compute dtype."""


class ModelFamily(Protocol):
    """The class of a family: called with a transformers configuration and weights, it takes what it needs of them."""

    def __call__(self, config: Any, weights: Weights) -> Model:
        """Build the model. Raises ModelError for a configuration it cannot run, or for missing or misshapen tensors."""

    def check(self, config: Any) -> None:
        """Raise ModelError for a configuration that this family cannot run exactly, before any weight is read."""
