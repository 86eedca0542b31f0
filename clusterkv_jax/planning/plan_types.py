"""What compiling tells of a model, a method and a mesh: the numbers that a plan is made of, as they travel between
processes.
"""

from dataclasses import dataclass

from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.planning.collectives import Collective


@dataclass(frozen=True)
class Sample:
    """Bytes of a chip at a context, or with a cache ratio: `at` says which."""

    at: float
    bytes: float


@dataclass(frozen=True)
class MeshLayout:
    """What a chip of another mesh holds, by the shapes alone."""

    data: int
    model: int
    weights: float
    cache: float
    hidden: float


@dataclass(frozen=True)
class Measures:
    """Bytes are those of one chip.

    Attributes:
        mesh: sizes of the axes.
        groups: of chips that read different sequences, where the batch can be divided by their number.
        batch_ways: into how many parts the batch is split.
        batch: sequences that were compiled for.
        context: tokens of each prompt.
        positions: the most that the model has.
        layers: of the model.
        compiled_layers: of the decode program that was compiled, all, or of two where the compiler refuses that one;
            empty where none was compiled for the chip.
        weights: parameters.
        step_reads: bytes that a decode step reads, of parameters and cache.
        hidden: hidden states of a batch, which a layer hands on to the next; part of the temporaries of prefill.
        cache: of the method, at two contexts, the first of them that of the plan.
        prefill: temporaries of prefill at two contexts: hidden states and what a layer's program allocates.
        decode: temporaries of the decode program.
        programs: compiled programs, which lie in the chip's memory too.
        full_cache: of a cache without compression.
        by_ratio: the cache with this ratio and with half of it; empty where the budget is no ratio.
        collectives: of one decode step.
        whole: logical axes that the mesh does not divide, so that they stay whole on every chip.
        layouts: other meshes.
        refusals: what the compiler refused, a sentence each.
        learned: whether the method goes by scores of a calibration.
    """

    mesh: dict[str, int]
    groups: int
    batch_ways: int
    batch: int
    context: int
    positions: int
    layers: int
    compiled_layers: tuple[int, ...]
    weights: float
    step_reads: float
    hidden: float
    cache: tuple[Sample, ...]
    prefill: tuple[Sample, ...]
    decode: float
    programs: float
    full_cache: float
    by_ratio: tuple[Sample, ...]
    collectives: tuple[Collective, ...]
    whole: tuple[str, ...]
    layouts: tuple[MeshLayout, ...]
    refusals: tuple[str, ...] = ()
    learned: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned, in the words of the command."""

    model: str
    method: str
    ratio: float | None
    context: int
    batch: int
    new_tokens: int
    topology: str
    mesh: str | None
    weights: str | None = None
    gate: Gate | None = None
