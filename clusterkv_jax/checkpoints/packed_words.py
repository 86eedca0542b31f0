"""GPTQ's and AWQ's tensors: codes in words of 32 bits, [inputs, outputs], with scales and zeros for groups of inputs.

GPTQ packs codes of neighbouring inputs into a word, AWQ those of eight outputs, of which the even ones come first. Both
pack the zeros of neighbouring outputs. GPTQ may order inputs by their activations: `g_idx` has the group of each.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from clusterkv_jax.checkpoints.repack import Coded, in_groups, with_scales
from clusterkv_jax.models.hf_quantization import PackedWords
from clusterkv_jax.storage.schema import AnyPath
from clusterkv_jax.storage.weight_files import FILE_TYPES, CheckpointError, TensorEntry

# Where a word of AWQ's has the code of its first output, its second ...
_PLACES = {"gptq": np.arange(8), "awq": np.array([0, 4, 1, 5, 2, 6, 3, 7])}


@dataclass(frozen=True)
class WordsTensor:
    """A weight, [outputs, inputs], in words."""

    how: PackedWords
    codes: TensorEntry
    zeros: TensorEntry
    scales: TensorEntry
    groups: TensorEntry | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        each = 32 // self.how.bits if self.how.method == "gptq" else 1
        return self.scales.shape[1], self.codes.shape[0] * each

    @property
    def path(self) -> AnyPath:
        """The file of the codes."""
        return self.codes.path

    @property
    def dtype(self) -> str:
        """The type of its scales."""
        return self.scales.dtype

    def map(self) -> Float[np.ndarray, "N I"]:
        """All of its numbers."""
        return self.read(*map(np.arange, self.shape))

    def read(
        self, rows: Int[np.ndarray, " rows"], columns: Int[np.ndarray, " columns"]
    ) -> Float[np.ndarray, "rows columns"]:
        """The numbers of some outputs and inputs."""
        group = self._group_of_inputs()[columns]
        if group.size and not 0 <= group.min() <= group.max() < self.scales.shape[0]:
            raise CheckpointError(f"A g_idx in {self.path} names a group that is none of {self.scales.shape[0]}.")
        codes = self._codes(rows)[:, columns].astype(np.float32) - self._zeros(rows)[:, group]
        return codes * self._scales(rows)[:, group]

    def coded(self, rows: Int[np.ndarray, " rows"]) -> Coded | None:
        """Some outputs in codes; None where the inputs of a group do not follow each other."""
        inputs = self.shape[1]
        each = inputs // self.scales.shape[0]
        if inputs % self.scales.shape[0] or not np.array_equal(self._group_of_inputs(), np.arange(inputs) // each):
            return None
        middle, scales = 2 ** (self.how.bits - 1), self.scales.map()[:, rows].T
        offsets = (middle - self._zeros(rows)) * scales.astype(np.float32)
        codes = self._codes(rows)
        codes = codes if self.how.bits == 4 else (codes ^ 0x80).view(np.int8)
        kind = "int4" if self.how.bits == 4 else "int8"
        return in_groups(with_scales(kind, codes, scales, offsets if offsets.any() else None))

    def _group_of_inputs(self) -> np.ndarray:
        if self.groups is not None:
            return self.groups.codes().view("<i4").reshape(-1)
        inputs = self.shape[1]
        return np.arange(inputs) // -(-inputs // self.scales.shape[0])

    def _scales(self, rows: np.ndarray) -> np.ndarray:
        return self.scales.map()[:, rows].T.astype(np.float32)

    def _codes(self, rows: np.ndarray) -> np.ndarray:
        words, bits = _words(self.codes), self.how.bits
        if self.how.method == "awq":
            return self._of_outputs(words, rows).T
        own = np.ascontiguousarray(words[:, rows].T)
        each = [(own >> np.uint32(bits * i) & (2**bits - 1)).astype(np.uint8) for i in range(32 // bits)]
        return np.stack(each, axis=-1).reshape(len(rows), -1)

    def _zeros(self, rows: np.ndarray) -> np.ndarray:
        zeros = self._of_outputs(_words(self.zeros), rows).T
        return ((zeros.astype(np.int32) + self.how.below) % 2**self.how.bits).astype(np.float32)

    def _of_outputs(self, words: np.ndarray, rows: np.ndarray) -> np.ndarray:
        bits, each = self.how.bits, 32 // self.how.bits
        shifts = bits * _PLACES[self.how.method][rows % each]
        return (words[:, rows // each] >> shifts.astype(np.uint32) & (2**bits - 1)).astype(np.uint8)


def of_words(entries: dict[str, TensorEntry], how: PackedWords) -> dict[str, TensorEntry | WordsTensor]:
    """Entries by the names that they have in a model which is not quantised.

    Raises CheckpointError, in one sentence that names the tensor, where codes lack what they need.
    """
    ends = (".qweight", ".qzeros", ".scales", ".g_idx")
    names = [name.removesuffix(ends[0]) for name in entries if name.endswith(ends[0])]
    parts = {f"{name}{end}" for name in names for end in ends}
    found: dict[str, TensorEntry | WordsTensor] = {name: x for name, x in entries.items() if name not in parts}
    for name in names:
        codes, zeros, scales = (entries.get(f"{name}{end}") for end in ends[:3])
        assert codes is not None
        if zeros is None or scales is None:
            missing = f"{name}{ends[1] if zeros is None else ends[2]}"
            raise CheckpointError(
                f"{name}.qweight in {codes.path} lacks {missing}, without which codes are no numbers."
            )
        tensor = WordsTensor(how, codes, zeros, scales, entries.get(f"{name}.g_idx"))
        _check(name, tensor)
        found[f"{name}.weight"] = tensor
    return found


def _check(name: str, tensor: WordsTensor) -> None:
    """Raise CheckpointError unless the shapes and types of a weight's tensors go together."""
    each = 32 // tensor.how.bits
    for part, entry in (("qweight", tensor.codes), ("qzeros", tensor.zeros)):
        if entry.dtype != "I32" or len(entry.shape) != 2:
            raise CheckpointError(
                f"{name}.{part} in {entry.path} holds {entry.dtype} {list(entry.shape)}; allowed: a matrix of I32."
            )
    if tensor.scales.dtype not in FILE_TYPES or len(tensor.scales.shape) != 2:
        raise CheckpointError(
            f"{name}.scales in {tensor.path} holds {tensor.scales.dtype} {list(tensor.scales.shape)}; allowed: "
            f"a matrix of {', '.join(FILE_TYPES)}."
        )
    groups, outputs = tensor.scales.shape
    inputs = tensor.shape[1]
    packed = outputs // each if tensor.how.method == "awq" else outputs
    wanted: dict[str, tuple[TensorEntry, tuple[int, ...]]] = {
        "qweight": (tensor.codes, (tensor.codes.shape[0], packed)),
        "qzeros": (tensor.zeros, (groups, -(-outputs // each))),
    }
    if tensor.groups is not None:
        wanted["g_idx"] = (tensor.groups, (inputs,))
    for part, (entry, shape) in wanted.items():
        if entry.shape != shape:
            raise CheckpointError(
                f"{name}.{part} in {entry.path} has the shape {list(entry.shape)}, its scales imply {list(shape)}."
            )


def _words(entry: TensorEntry) -> np.ndarray:
    return entry.codes().view("<u4")
