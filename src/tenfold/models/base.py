"""The seam between models and the runtime: what a model may know about one forward pass, and what it gives back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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


class HeadNorm(NamedTuple):
    """Root mean square normalisation of every head by ``weight`` [head_dim]; ``rounded`` as in ``Recorder.norm``."""

    weight: Tensor
    epsilon: float
    rounded: bool


class Recorder(Protocol):
    """What a forward pass is written down with, for a backend that runs it as a whole (``tenfold.runtime.program``).

    Activations are whatever the recorder makes of them: a model passes them on, ``split``s them into neighbouring
    columns, and looks at their ``width``. A packed weight is what the recorder's backend made of it at loading.
    """

    def embed(self, table: Tensor) -> Any:
        """The rows of ``table`` [vocabulary, width] for the step's tokens."""

    def rotary(self, frequencies: Tensor, scaling: float) -> None:
        """Compute the angles of the step's positions, which every ``attention`` after it uses."""

    def norm(self, x: Any, weight: Tensor, epsilon: float, *, rounded: bool = True) -> Any:
        """Root mean square normalisation.

        With ``rounded`` the normalised value is rounded to the compute dtype before ``weight`` meets it.
        """

    def select_sampled(self, x: Any) -> Any:
        """The rows of the tokens that are sampled from; what is made of them has no others."""

    def linear(self, x: Any, weight: Any, *, add_to: Any = None, activation: str = "silu") -> Any:
        """The product with a packed weight, plus its bias; added to ``add_to`` in place if that is given.

        A weight that was packed as gated makes ``activation(gate) * up``.
        """

    def logits(self, x: Any, weight: Any) -> Any:
        """The product that the forward pass is there for, of rows that were selected, in float32."""

    def attention(
        self,
        layer: int,
        query: Any,
        key: Any,
        value: Any,
        *,
        head_dim: int,
        scale: float,
        query_head_stride: int | None = None,
        query_norm: HeadNorm | None = None,
        key_norm: HeadNorm | None = None,
    ) -> Any:
        """Normalise heads where asked to, rotate, and do as ``Step.attend``; returns the heads side by side.

        Heads of ``query`` begin ``query_head_stride`` columns after each other, ``head_dim`` if that is None.
        """

    def convolve(self, layer: int, x: Any, weight: Tensor) -> Any:
        """As ``Step.convolve``, then silu."""

    def delta_rule(
        self, layer: int, query: Any, key: Any, value: Any, beta: Any, step_size: Any, rate: Tensor, step_bias: Tensor
    ) -> Any:
        """As ``Step.delta_rule`` with ``sigmoid(beta)`` and decay ``-rate * softplus(step_size + step_bias)``."""

    def gated_norm(self, x: Any, gate: Any, weight: Tensor, epsilon: float) -> Any:
        """Heads of ``weight``'s size, normalised, multiplied by it and by ``silu(gate)``, in place."""

    def sigmoid_gate(self, x: Any, gate: Any, head_dim: int, gate_head_stride: int) -> Any:
        """Heads of ``x`` times ``sigmoid(gate)``, in place; the gate's heads are ``gate_head_stride`` columns apart."""


class Model(Protocol):
    """A loaded model. It keeps no state between steps: all of that lives with the runtime, behind ``Step``."""

    def forward(self, step: Step) -> Tensor:
        """Return the logits [S, vocabulary] of the sampled rows, in the compute dtype."""

    def record(self, recorder: Recorder) -> None:
        """Write the forward pass down, up to the logits of the sampled rows. Needs weights that were packed."""


class ModelFamily(Protocol):
    """The class of a family: called with a transformers configuration and weights, it takes what it needs of them."""

    def __call__(self, config: Any, weights: Weights) -> Model:
        """Build the model. Raises ModelError for a configuration it cannot run, or for missing or misshapen tensors."""

    def check(self, config: Any) -> None:
        """Raise ModelError for a configuration that this family cannot run exactly, before any weight is read."""
