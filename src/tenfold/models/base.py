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

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve every channel causally over each token's own sequence, without bias or activation.

        ``layer`` counts the recurrent layers from 0. ``x`` is [T, channels] and ``weight`` [channels, width], whose
        last column meets the token itself; both in the compute dtype. Before its first token a sequence is zero. Keeps
        the last ``width - 1`` inputs of every sequence. Returns [T, channels] in the compute dtype.
        """

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Update the matrix state of each token's own sequence by the gated delta rule (arXiv:2412.06464), and read it.

        For every value head, with unit vectors q and k: ``S = exp(decay) S``, ``S = S + k (beta (v - k S))``, and the
        result is ``q S / sqrt(key_dim)``. ``layer`` counts the recurrent layers from 0. ``query`` and ``key`` are
        [T, key_heads, key_dim], not yet normalised; each serves ``value_heads / key_heads`` consecutive value heads.
        ``value`` is [T, value_heads, value_dim], ``beta`` [T, value_heads], all in the compute dtype. ``decay`` is
        float32 [T, value_heads], natural logarithms of at most 0. States are float32 whatever the compute dtype.
        Returns [T, value_heads, value_dim] in the compute dtype.
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
