"""The layers that families share. Their arithmetic follows transformers step by step, so results match it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tenfold.errors import ModelError
from tenfold.models.base import HeadNorm, Recorder, Step
from tenfold.models.quantise import Quantised
from tenfold.models.weights import Packing, Weights

EMBEDDING = "model.embed_tokens.weight"
"""The table of the embedding, which is also the head's weight where they are tied."""
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Linear:
    """An affine map of the last dimension: torch's, or one whose weight is packed for a recorded forward pass."""

    def __init__(
        self,
        weight: Tensor | Quantised,
        bias: Tensor | None = None,
        *,
        pack: Packing | None = None,
        gated: bool = False,
    ) -> None:
        """``weight`` is [out, in], ``bias`` is [out] or None. With ``pack`` only what it makes of them is kept.

        ``gated`` says that the first half of the outputs gates the second. Raises TypeError for a quantised weight
        without ``pack``.
        """
        self._plain: tuple[Tensor, Tensor | None] | None = None
        self._packed: Any = None
        if pack is not None:
            self._packed = pack(weight, bias, gated)
        elif isinstance(weight, Quantised):
            raise TypeError("a quantised weight has to be packed")
        else:
            self._plain = weight, bias

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        bias: bool,
        *,
        gated: bool = False,
    ) -> Linear:
        """Take projections that share their input as one, stacked in the order of ``names``.

        ``names`` lack the ``.weight``; ``outputs`` are their sizes. Raises ModelError for a missing tensor.
        """
        paths, shapes = [f"{name}.weight" for name in names], [(size, inputs) for size in outputs]
        kept = weights.quantised(paths, shapes)
        weight = weights.stack(paths, shapes) if kept is None else kept
        biases = weights.stack([f"{name}.bias" for name in names], [(size,) for size in outputs]) if bias else None
        return cls(weight, biases, pack=weights.pack, gated=gated)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if self._plain is None:
            raise RuntimeError("a packed weight multiplies in recorded forward passes only")
        return functional.linear(x, *self._plain)

    @property
    def packed(self) -> Any:
        """What ``pack`` made of the weight."""
        if self._packed is None:
            raise RuntimeError("the weight was not packed when it was loaded")
        return self._packed


class Embedding:
    """A row of ``weight`` [vocabulary, width] for each token."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map int64 [T] to [T, width]."""
        return functional.embedding(token_ids, self.weight)


def output_head(config: Any, weights: Weights, embedding: Embedding) -> Linear:
    """The map from [..., width] to logits [..., vocabulary]: its own weight, or the embedding's where they are tied."""
    if config.tie_word_embeddings:
        weights.ignore("lm_head.weight")
        kept = weights.quantised([EMBEDDING], [(config.vocab_size, config.hidden_size)])
        return Linear(embedding.weight if kept is None else kept, pack=weights.pack)
    return Linear.load(weights, ["lm_head"], config.hidden_size, [config.vocab_size], bias=False)


class RMSNorm:
    """Root mean square normalisation of the last dimension, in float32 inside whatever the compute dtype is."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """``weight`` is [width]."""
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., width]; the result has the dtype of ``x``."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)

    def record(self, step: Recorder, x: Any) -> Any:
        """Write the normalisation down."""
        return step.norm(x, self.weight, self.epsilon, rounded=True)

    def of_heads(self) -> HeadNorm:
        """The normalisation of heads as a part of recorded attention."""
        return HeadNorm(self.weight, self.epsilon, rounded=True)


class Rotary:
    """Rotary positions: the angles of a step, computed once, and their application in every layer."""

    def __init__(self, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> None:
        """``inverse_frequencies`` is float32 [rotary_dim / 2]; ``scaling`` multiplies the cosines and sines."""
        self.inverse_frequencies = inverse_frequencies
        self.scaling = scaling
        self.dtype = dtype

    @classmethod
    def load(cls, config: Any, weights: Weights) -> Rotary:
        """Take the frequencies from the configuration. GGUF files may hold divisors for them, which are applied.

        Raises ModelError, naming the kind, for one whose frequencies change with the length of a sequence.
        """
        check_rope(config)
        frequencies, scaling = _inverse_frequencies(config)
        if "rope_freqs.weight" in weights:
            exact = Weights(weights.source)
            frequencies = frequencies / exact.take("rope_freqs.weight", frequencies.shape)
            weights.ignore("rope_freqs.weight")
        return cls(frequencies.to(weights.device), scaling, weights.dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for int64 ``positions`` [T], each [T, 1, rotary_dim] in the compute dtype."""
        half = positions[:, None, None].to(torch.float32) * self.inverse_frequencies
        both = torch.cat((half, half), dim=-1)
        return (both.cos() * self.scaling).to(self.dtype), (both.sin() * self.scaling).to(self.dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [T, heads, head_dim] by the angles of its positions; dimensions beyond rotary_dim pass through."""
    cosines, sines = angles
    size = cosines.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], angles), x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Decoder:
    """Layers between an embedding and a head, which is what all families are; each one's constructor fills it.

    A layer is called with activations [T, width], angles and the step, and ``record``s itself with a recorder, an
    activation and whether it is the last; both return what the next one gets.
    """

    embedding: Embedding
    rotary: Rotary
    layers: Sequence[Any]
    norm: Any
    head: Linear

    def forward(self, step: Step) -> Tensor:
        """Return the logits [S, vocabulary] of the step's sampled rows, in the compute dtype."""
        x = self.embedding(step.token_ids)
        angles = self.rotary.angles(step.positions)
        for layer in self.layers:
            x = layer(x, angles, step)
        return self.head(self.norm(x.index_select(0, step.sampled)))

    def record(self, recorder: Recorder) -> None:
        """Write the forward pass down."""
        x = recorder.embed(self.embedding.weight)
        recorder.rotary(self.rotary.inverse_frequencies, self.rotary.scaling)
        for layer in self.layers:
            x = layer.record(recorder, x, last=layer is self.layers[-1])
        recorder.logits(self.norm.record(recorder, x), self.head.packed)


class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, with gate and up as one projection."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        """``gate_up`` maps width to 2 * inner, the gate first; ``activation`` is the configuration's name for it."""
        self.gate_up = gate_up
        self.down = down
        self.activation_name = activation
        self.activation = activation_function(activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, width] to [T, width]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)

    def record(self, step: Recorder, x: Any, add_to: Any) -> Any:
        """Write the map down, its result added to ``add_to``."""
        gated = step.linear(x, self.gate_up.packed, activation=self.activation_name)
        return step.linear(gated, self.down.packed, add_to=add_to)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation that configurations call ``name``; raises ModelError when there is none."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def check_rope(config: Any) -> None:
    """Raise ModelError, naming it, for a kind of rotary scaling that is not one of ROPE_KINDS."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")


def refuse_sliding_window(config: Any) -> None:
    """Raise ModelError when some layer attends to a window shorter than the context.

    A window as long as the context hides nothing, and is allowed.
    """
    window = getattr(config, "sliding_window", None)
    # Qwen configurations state a window per layer, and keep the number even where no layer uses it.
    kinds = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds is not None else window is not None
    if windowed and (window is None or window < config.max_position_embeddings):
        raise ModelError(f"sliding-window attention (window {window}) is not supported: cached keys are never dropped")


def head_width(config: Any) -> int:
    """The size of one attention head: stated by the configuration, or the hidden size split among the heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _inverse_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return float32 [rotary_dim / 2] and the factor for cosines and sines, as transformers computes them.

    "dynamic" starts to differ from its initial frequencies only beyond max_position_embeddings, where nothing runs.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
        return frequencies.to(torch.float32), float(scaling)
    width = int(head_width(config) * parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / (parameters["rope_theta"] ** steps), 1.0
