"""A model's forward pass, recorded once and run by ``native.cpp`` with one call a step.

A model writes itself down through ``Program``'s methods, which are the operations of ``tenfold.models.base.Recorder``:
each takes activations, says which operation comes next and returns the activation it makes. Nothing is computed while
that happens. ``run`` then executes all of it for the tokens of a step, without the interpreter in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tenfold.models.base import HeadNorm
from tenfold.models.quantise import GROUP, Format
from tenfold.runtime.batch import Batch
from tenfold.runtime.kernels import ACTIVATIONS, native
from tenfold.runtime.kernels.native import PackedWeight
from tenfold.runtime.memory import ArenaMemory

FIRST_ROWS = 16
"""Rows that activations have room for at first; they double when a step has more."""


class _Rows(ctypes.Structure):
    _fields_: ClassVar = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


_FIELDS = {"r": _Rows, "p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def _struct(name: str, kind: int, fields: str) -> Any:
    """A struct of ``native.cpp``: ``fields`` lists names, each with the letter of its type."""
    pairs = [field.split(":") for field in fields.split()]
    columns = [("kind", ctypes.c_int64), *((field, _FIELDS[letter]) for field, letter in pairs)]
    return type(name, (ctypes.Structure,), {"_fields_": columns, "number": kind})


_EMBED = _struct("Embed", 0, "table:p width:i out:r")
_ANGLES = _struct("Angles", 1, "frequencies:p half:i scaling:f cosines:r sines:r")
_NORM = _struct("Norm", 2, "x:r out:r weight:p width:i epsilon:f rounded:i sampled:i")
_SELECT = _struct("Select", 3, "x:r out:r width:i")
_LINEAR = _struct(
    "Linear",
    4,
    "x:r out:r residual:r weight:p bias:p scales:p least:p format:i inputs:i outputs:i gated:i activation:i sampled:i"
    " float_out:i bytes:p row_scales:p row_sums:p",
)
_ATTENTION = _struct(
    "Attention",
    5,
    "query:r key:r value:r out:r query_head_stride:i heads:i kv_heads:i dim:i keys:p values:p page_stride:i"
    " block_size:i key_scales:p value_scales:p scale_stride:i query_norm:p key_norm:p cosines:r sines:r rotary:i"
    " rounded:i epsilon:f scale:f",
)
_CONVOLVE = _struct("Convolve", 6, "x:r out:r weight:p tails:p slot_stride:i tap_stride:i channels:i width:i")
_DELTA_RULE = _struct(
    "DeltaRule",
    7,
    "query:r key:r value:r beta:r step_size:r out:r rate:p step_bias:p states:p slot_stride:i key_heads:i"
    " value_heads:i key_dim:i value_dim:i",
)
_GATED_NORM = _struct("GatedNorm", 8, "x:r gate:r weight:p heads:i dim:i epsilon:f")
_SIGMOID_GATE = _struct("SigmoidGate", 9, "x:r gate:r gate_head_stride:i heads:i dim:i")
_OPERATIONS = (
    _EMBED, _ANGLES, _NORM, _SELECT, _LINEAR, _ATTENTION, _CONVOLVE, _DELTA_RULE, _GATED_NORM, _SIGMOID_GATE,
)  # fmt: skip


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("tokens", "sampled", "sequences")),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "places", "samples", "starts", "bounds", "slots", "tables")
        ),
        ("table_stride", ctypes.c_int64),
    ]


@dataclass(eq=False)
class _Buffer:
    """Rows that operations write and read: ``width`` elements of a dtype each."""

    width: int
    dtype: torch.dtype
    sampled: bool = False
    """It has a row for each token that is sampled from, and not for every token."""
    last: int = 0
    """The last operation that touches it."""
    memory: Tensor | None = None


@dataclass(frozen=True)
class Activation:
    """Some columns of a buffer. Slices of it are activations too."""

    buffer: _Buffer
    offset: int
    width: int

    def split(self, sizes: list[int]) -> list[Activation]:
        """Neighbouring columns, of these sizes."""
        parts, offset = [], self.offset
        for size in sizes:
            parts.append(Activation(self.buffer, offset, size))
            offset += size
        return parts

    def after(self, columns: int) -> Activation:
        """All columns but the first ones."""
        return Activation(self.buffer, self.offset + columns, self.width - columns)


@dataclass
class _Operation:
    struct: Any
    rows: dict[str, Activation]
    values: dict[str, Any]
    tensors: dict[str, Tensor | None] = field(default_factory=dict)


class Program:
    """Records operations, then runs them.

    ``memory`` is where attention and recurrent layers keep their keys, values and states.
    """

    def __init__(self, memory: ArenaMemory, dtype: torch.dtype) -> None:
        if dtype not in native.DTYPES:
            raise ValueError(f"no kernel computes in {dtype}")
        self.memory = memory
        self.dtype = dtype
        self._operations: list[_Operation] = []
        self._result: Activation | None = None
        self._rotary: tuple[_Buffer, _Buffer, int] | None = None
        self._rows = 0
        self._structs: list[Any] = []
        self._pointers: Any = None
        self._scratch: list[Tensor] = []
        self._seconds: np.ndarray | None = None

    # Recording

    def embed(self, table: Tensor) -> Activation:
        """The rows of ``table`` [vocabulary, width] for the step's tokens."""
        out = self._buffer(table.shape[1])
        self._record(_EMBED, {"out": out}, {"width": table.shape[1]}, {"table": self._of_dtype(table)})
        return out

    def rotary(self, frequencies: Tensor, scaling: float) -> None:
        """Compute the angles of the step's positions, which every ``attention`` after it uses."""
        half = len(frequencies)
        buffers = (_Buffer(half, torch.float32), _Buffer(half, torch.float32))
        self._rotary = (*buffers, half)
        angles = {name: Activation(buffer, 0, half) for name, buffer in zip(("cosines", "sines"), buffers, strict=True)}
        self._record(
            _ANGLES, angles, {"half": half, "scaling": scaling}, {"frequencies": frequencies.float().contiguous()}
        )

    def norm(self, x: Activation, weight: Tensor, epsilon: float, *, rounded: bool = True) -> Activation:
        """Root mean square normalisation; with ``rounded`` the normalised value is rounded before the weight."""
        out = self._buffer(x.width, like=x)
        values = {"width": x.width, "epsilon": epsilon, "rounded": rounded, "sampled": x.buffer.sampled}
        self._record(_NORM, {"x": x, "out": out}, values, {"weight": weight.float().contiguous()})
        return out

    def select_sampled(self, x: Activation) -> Activation:
        """The rows of the tokens that are sampled from; what is made of them has no others."""
        out = Activation(_Buffer(x.width, self.dtype, sampled=True), 0, x.width)
        self._record(_SELECT, {"x": x, "out": out}, {"width": x.width})
        return out

    def linear(
        self,
        x: Activation,
        weight: PackedWeight,
        *,
        add_to: Activation | None = None,
        activation: str = "silu",
    ) -> Activation:
        """The product with a packed weight, plus its bias.

        ``add_to`` is an activation that the product is added to, in place. A gated weight makes
        ``activation(gate) * up``.
        """
        out = add_to or self._buffer(weight.outputs, like=x)
        self._multiply(x, weight, out, add_to, activation)
        return out

    def logits(self, x: Activation, weight: PackedWeight) -> Activation:
        """The product that ``forward`` returns, of rows that were selected, in float32."""
        out = Activation(_Buffer(weight.outputs, torch.float32, sampled=True), 0, weight.outputs)
        self._multiply(x, weight, out)
        self._result = out
        return out

    def _multiply(
        self,
        x: Activation,
        weight: PackedWeight,
        out: Activation,
        add_to: Activation | None = None,
        activation: str = "silu",
    ) -> None:
        if x.width != weight.inputs:
            raise ValueError(f"{x.width} columns meet a weight of {weight.inputs} inputs")
        if x.buffer.sampled != out.buffer.sampled:
            raise ValueError("rows that were selected meet rows of all tokens")
        rows = {"x": x, "out": out} | ({"residual": add_to} if add_to is not None else {})
        values = {
            "format": int(weight.format),
            "inputs": weight.inputs,
            "outputs": weight.outputs,
            "gated": weight.gated,
            "activation": ACTIVATIONS.index(activation),
            "sampled": x.buffer.sampled,
            "float_out": out.buffer.dtype != self.dtype,
        }
        tensors = {"weight": weight.data, "bias": weight.bias, "scales": weight.scales, "least": weight.least}
        self._record(_LINEAR, rows, values, tensors)

    def attention(
        self,
        layer: int,
        query: Activation,
        key: Activation,
        value: Activation,
        *,
        head_dim: int,
        scale: float,
        query_head_stride: int | None = None,
        query_norm: HeadNorm | None = None,
        key_norm: HeadNorm | None = None,
    ) -> Activation:
        """Normalise heads where asked to, rotate, store keys and values in the arena, and attend.

        Heads of ``query`` begin ``query_head_stride`` columns after each other, ``head_dim`` if that is None; those of
        ``key`` and ``value`` lie side by side. Returns the heads side by side.
        """
        if self._rotary is None:
            raise RuntimeError("rotary comes before attention")
        stride = query_head_stride or head_dim
        heads, kv_heads = query.width // stride, key.width // head_dim
        out = self._buffer(heads * head_dim)
        cosines, sines, half = self._rotary
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        rows = {
            "query": query, "key": key, "value": value, "out": out,
            "cosines": Activation(cosines, 0, half), "sines": Activation(sines, 0, half),
        }  # fmt: skip
        if query_norm is not None and key_norm is not None and query_norm[1:] != key_norm[1:]:
            raise ValueError("queries and keys are normalised differently")
        given = query_norm or key_norm
        settings = {
            "query_head_stride": stride,
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": head_dim,
            "page_stride": keys.stride(0),
            "block_size": keys.shape[1],
            "scale_stride": self.memory.key_scales[layer].stride(0) if self.memory.key_scales else 0,
            "rotary": 2 * half,
            "rounded": given.rounded if given else False,
            "epsilon": given.epsilon if given else 0.0,
            "scale": scale,
        }
        tensors = {
            "keys": keys,
            "values": values,
            "key_scales": self.memory.key_scales[layer] if self.memory.key_scales else None,
            "value_scales": self.memory.value_scales[layer] if self.memory.value_scales else None,
            "query_norm": None if query_norm is None else query_norm.weight.float().contiguous(),
            "key_norm": None if key_norm is None else key_norm.weight.float().contiguous(),
        }
        self._record(_ATTENTION, rows, settings, tensors)
        return out

    def convolve(self, layer: int, x: Activation, weight: Tensor) -> Activation:
        """Causal convolution with ``weight`` [channels, width], then silu; keeps the tails of recurrent ``layer``."""
        tails = self.memory.tails[layer]
        out = self._buffer(x.width)
        values = {
            "slot_stride": tails.stride(0),
            "tap_stride": tails.stride(2),
            "channels": weight.shape[0],
            "width": weight.shape[1],
        }
        self._record(_CONVOLVE, {"x": x, "out": out}, values, {"weight": self._of_dtype(weight), "tails": tails})
        return out

    def delta_rule(
        self,
        layer: int,
        query: Activation,
        key: Activation,
        value: Activation,
        beta: Activation,
        step_size: Activation,
        rate: Tensor,
        step_bias: Tensor,
    ) -> Activation:
        """The gated delta rule on the states of recurrent ``layer``.

        ``beta`` is before its sigmoid; decay is ``exp(-rate * softplus(step_size + step_bias))``.
        """
        states = self.memory.states[layer]
        value_heads, key_dim, value_dim = states.shape[1:]
        out = self._buffer(value.width)
        rows = {"query": query, "key": key, "value": value, "beta": beta, "step_size": step_size, "out": out}
        values = {
            "slot_stride": states.stride(0),
            "key_heads": key.width // key_dim,
            "value_heads": value_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
        }
        tensors = {"rate": rate.float().contiguous(), "step_bias": step_bias.float().contiguous(), "states": states}
        self._record(_DELTA_RULE, rows, values, tensors)
        return out

    def gated_norm(self, x: Activation, gate: Activation, weight: Tensor, epsilon: float) -> Activation:
        """Heads of ``weight``'s size, normalised and multiplied by ``silu(gate)``, in place."""
        dim = len(weight)
        values = {"heads": x.width // dim, "dim": dim, "epsilon": epsilon}
        self._record(_GATED_NORM, {"x": x, "gate": gate}, values, {"weight": weight.float().contiguous()})
        return x

    def sigmoid_gate(self, x: Activation, gate: Activation, head_dim: int, gate_head_stride: int) -> Activation:
        """Heads of ``x`` times ``sigmoid(gate)``, in place; the gate's heads are ``gate_head_stride`` columns apart."""
        values = {"gate_head_stride": gate_head_stride, "heads": x.width // head_dim, "dim": head_dim}
        self._record(_SIGMOID_GATE, {"x": x, "gate": gate}, values)
        return x

    # Running

    def forward(self, batch: Batch) -> Tensor:
        """Run, and return the logits, float32 [S, vocabulary], which the next run overwrites."""
        self.run(batch)
        if self._result is None:
            raise RuntimeError("the program makes no logits")
        return self.view(self._result, len(batch.sampled))

    def run(self, batch: Batch) -> None:
        """Run the program for a step's tokens. Raises MemoryError."""
        tokens = len(batch.token_ids)
        if tokens > self._rows:
            self._bind(max(tokens, 2 * self._rows, FIRST_ROWS))
        slots = self.memory.places(batch.slots)
        tables = batch.tables
        step = _Step(
            tokens,
            len(batch.sampled),
            len(batch.rows),
            batch.token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.places.data_ptr(),
            batch.sampled.data_ptr(),
            batch.starts.ctypes.data,
            batch.bounds.ctypes.data,
            slots.ctypes.data,
            tables.ctypes.data,
            tables.strides[0] // tables.itemsize,
        )
        failed = native.library().tenfold_run(
            self._pointers,
            len(self._structs),
            ctypes.addressof(step),
            self.dtype == torch.bfloat16,
            torch.get_num_threads(),
            None if self._seconds is None else self._seconds.ctypes.data,
        )
        if failed:
            raise MemoryError("the CPU kernels could not allocate their working memory")

    def view(self, x: Activation, rows: int) -> Tensor:
        """The first rows of an activation as the last run left them; later operations may have reused its memory."""
        memory = x.buffer.memory
        if memory is None:
            raise RuntimeError("nothing was run yet")
        return memory[:rows, x.offset : x.offset + x.width]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all that operations read besides activations and the arena, each tensor counted once."""
        arena = self.memory.data.untyped_storage().data_ptr()
        tensors = (tensor for operation in self._operations for tensor in operation.tensors.values())
        weights = [each for each in tensors if each is not None and each.untyped_storage().data_ptr() != arena]
        return sum({each.data_ptr(): each.nbytes for each in weights}.values())

    def products(self) -> tuple[int, int, int]:
        """Operations of matrix products for a token, those for a sampled row beyond it, and bytes of the weights."""
        counts, nbytes = [0, 0], 0
        for operation in self._operations:
            if operation.struct is _LINEAR:
                values = operation.values
                halves = 2 if values["gated"] else 1
                counts[values["sampled"]] += 2 * halves * values["inputs"] * values["outputs"]
                parts = (operation.tensors[name] for name in ("weight", "scales", "least"))
                nbytes += sum(part.nbytes for part in parts if part is not None)
        return counts[0], counts[1], nbytes

    def profile(self) -> dict[str, float]:
        """Seconds by kind of operation since the first call, which only starts the measurement."""
        if self._seconds is None:
            self._seconds = np.zeros(len(self._operations))
        totals: dict[str, float] = {}
        for operation, seconds in zip(self._operations, self._seconds.tolist(), strict=True):
            name = operation.struct.__name__
            totals[name] = totals.get(name, 0.0) + seconds
        return totals

    # What recording and running share

    def _buffer(self, width: int, like: Activation | None = None) -> Activation:
        return Activation(_Buffer(width, self.dtype, like is not None and like.buffer.sampled), 0, width)

    def _record(
        self,
        struct: Any,
        rows: dict[str, Activation],
        values: dict[str, Any],
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        for activation in rows.values():
            activation.buffer.last = len(self._operations)
        self._operations.append(_Operation(struct, rows, values, dict(tensors or {})))
        self._rows = 0  # to be bound anew

    def _of_dtype(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous()

    def _bind(self, rows: int) -> None:
        """Give every buffer memory for ``rows`` rows, the same one where they do not live at once, and fill structs."""
        for number, struct in enumerate((*_OPERATIONS, _Step)):
            if native.library().tenfold_size(number) != ctypes.sizeof(struct):
                raise RuntimeError(f"{struct.__name__} has another layout in the compiled library")
        self._rows = rows
        self._scratch = self._quantisation_scratch(rows)
        free: list[Tensor] = []
        placed: set[_Buffer] = set()
        structs = []
        for at, operation in enumerate(self._operations):
            buffers = list(dict.fromkeys(activation.buffer for activation in operation.rows.values()))
            for buffer in buffers:
                if buffer not in placed:
                    placed.add(buffer)
                    buffer.memory = self._place(buffer, rows, free)
            structs.append(self._fill(operation))
            done = (buffer for buffer in buffers if buffer.last == at and not self._is_result(buffer))
            free += [buffer.memory for buffer in done if buffer.memory is not None]
        self._structs = structs
        self._pointers = (ctypes.c_void_p * len(structs))(*map(ctypes.addressof, structs))

    def _is_result(self, buffer: _Buffer) -> bool:
        return self._result is not None and self._result.buffer is buffer

    @staticmethod
    def _place(buffer: _Buffer, rows: int, free: list[Tensor]) -> Tensor:
        # Rows begin on cache lines.
        width = -(-buffer.width // 32) * 32
        for i, memory in enumerate(free):
            if memory.shape[1] == width and memory.dtype == buffer.dtype:
                return free.pop(i)
        return torch.empty(rows, width, dtype=buffer.dtype)

    def _quantisation_scratch(self, rows: int) -> list[Tensor]:
        """Bytes, scales and sums of quantised rows, which all products share."""
        wide = [
            operation.values["inputs"]
            for operation in self._operations
            if operation.struct is _LINEAR and operation.values["format"] >= Format.INT8
        ]
        if not wide:
            return []
        groups = -(-max(wide) // GROUP)
        return [
            torch.empty(rows * max(wide), dtype=torch.int8),
            torch.empty(rows * groups),
            torch.empty(rows * groups),
        ]

    def _fill(self, operation: _Operation) -> Any:
        struct = operation.struct(kind=operation.struct.number, **operation.values)
        for name, activation in operation.rows.items():
            memory = activation.buffer.memory
            assert memory is not None
            data = memory.data_ptr() + activation.offset * memory.element_size()
            setattr(struct, name, _Rows(data, memory.stride(0)))
        for name, tensor in operation.tensors.items():
            setattr(struct, name, None if tensor is None else tensor.data_ptr())
        if operation.struct is _LINEAR and self._scratch:
            struct.bytes, struct.row_scales, struct.row_sums = (part.data_ptr() for part in self._scratch)
        return struct
