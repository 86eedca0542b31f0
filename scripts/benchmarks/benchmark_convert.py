"""Memory and time of `clusterkv convert` for a model of any size, which need not fit into memory.

    python scripts/benchmarks/benchmark_convert.py --gigabytes 20 --folder /scratch

A Llama with the shapes of Llama 3.1 8B and as many layers as fill the gigabytes is written as safetensors of 5 GB, most
of them holes that take no room on the disk. It is converted in a process of its own, and read again, parameter by
parameter, in another. The folder needs room for the model once, and all of it is deleted in the end.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from clusterkv_jax.checkpoints.loading import open_checkpoint
from clusterkv_jax.models import registry
from clusterkv_jax.models.hf_weights import file_shapes, layout

GB = 10**9
PUBLISHED = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Random numbers at the beginning of each tensor; the rest are zeros.
_RANDOM = 2**19

CONVERT = "import sys; from clusterkv_jax.checkpoints.convert import convert; convert(sys.argv[1], sys.argv[2])"
READ = """
import sys, jax
from clusterkv_jax.checkpoints.loading import open_checkpoint
for parameter in jax.tree.leaves(open_checkpoint(sys.argv[1]).parameters):
    parameter.view()[tuple(slice(0, n) for n in parameter.about.shape)]
"""
# Said by the process itself: what the system says of it counts the memory of the process that started it, too.
PEAK = """
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


def shapes_of(gigabytes: float) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """A configuration and its tensors, of about so many gigabytes in bfloat16."""

    def shapes(layers: int) -> tuple[dict, dict[str, tuple[int, ...]]]:
        published = {**PUBLISHED, "num_hidden_layers": layers}
        config = registry.from_hf(published)
        return published, file_shapes(layout(config, registry.FAMILIES[config.family].weights))

    one, two = (size_of(shapes(layers)[1]) for layers in (1, 2))
    return shapes(max(1, round((gigabytes * GB - 2 * one + two) / (two - one))))


def size_of(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes in bfloat16."""
    return 2 * sum(int(np.prod(shape)) for shape in shapes.values())


def write_model(folder: Path, gigabytes: float) -> int:
    """Safetensors with holes, their index and config.json; returns the model's bytes."""
    published, shapes = shapes_of(gigabytes)
    rng, places, files = np.random.default_rng(0), {}, [{}]
    for name, shape in shapes.items():
        if files[-1] and size_of({**files[-1], name: shape}) > 5 * GB:
            files.append({})
        files[-1][name] = shape
    for number, tensors in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        places |= dict.fromkeys(tensors, file)
        _write_file(folder / file, tensors, rng)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(published))
    return size_of(shapes)


def _write_file(path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + size_of({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for about in header.values():
            start, stop = about["data_offsets"]
            # The upper halves of numbers in float32 are bfloat16.
            numbers = rng.standard_normal(min(_RANDOM, (stop - start) // 2), dtype=np.float32)
            file.seek(8 + len(text) + start)
            file.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def measured(program: str, *arguments: Path) -> tuple[float, float]:
    """Seconds and peak GB of memory (pages of mapped files among them) of a Python program, on Linux."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", program + PEAK, *map(str, arguments)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"A process ended with status {process.returncode}.")
    return time.perf_counter() - begin, int(process.stdout.split()[-1]) * 1024 / GB


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the model.", min=0.1)] = 20,
    folder: Annotated[Path | None, typer.Option(help="Where there is room for it.")] = None,
) -> None:
    """Print a table of memory and time."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        source.mkdir()
        size = write_model(source, gigabytes) / GB
        count = len(open_checkpoint(source).parameters["layers"])
        print(f"{size:.1f} GB, {count} layers", flush=True)
        for name, program, paths in (("convert", CONVERT, (source, target)), ("read", READ, (target,))):
            seconds, peak = measured(program, *paths)
            print(f"{name}: {seconds:.0f} s ({size / seconds:.2f} GB/s), peak {peak:.2f} GB of memory", flush=True)


if __name__ == "__main__":
    typer.run(main)
