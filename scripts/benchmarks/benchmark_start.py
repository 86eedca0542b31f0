"""Times a process from its start to a first token, without a compilation cache and with one that is warm.

    python scripts/benchmarks/benchmark_start.py --folder /scratch                 Llama-3.1-8B's shapes
    python scripts/benchmarks/benchmark_start.py --model demo --tokens 4096   a model that is there

Processes run one after the other; the first fills the cache, which begins empty, and the last has its table's line. The
same request, once more in the same process, says what reading the prompt takes: what the first request takes beyond it
is compiling, in which tracing, lowering and reading of programs from the cache are counted. Weights that are written
for this are safetensors with holes, of which the system's page cache has all.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

RANDOM = 2**19  # numbers at the beginning of each tensor


def child(options: argparse.Namespace) -> None:
    """Print what each part took, as JSON."""
    times = {"begin": options.begin}
    import jax

    import clusterkv_jax as ckv
    from clusterkv_jax.cli.terminal import use_compilation_cache
    from clusterkv_jax.presets import preset
    from clusterkv_jax.runtime.programs import compilation

    use_compilation_cache(True, options.cache)
    jax.devices()
    times["imported"] = time.time()
    model = ckv.load(options.model)
    jax.block_until_ready(model.params)
    times["loaded"] = time.time()
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, options.tokens).tolist()
    budget = None if options.method == "full" else ckv.Budget(ratio=options.ratio)
    request = {"method": preset(options.method, budget), "max_new_tokens": 2}
    with compilation() as compiled:
        ckv.generate(model, [prompt], **request)
    times["first"] = time.time()
    ckv.generate(model, [prompt], **request)
    times["second"] = time.time()
    took = {name: times[name] - times[before] for before, name in pairwise(times)}
    print(json.dumps(took | {"programs": compiled.programs, "cached": compiled.cached}))


def run(options: argparse.Namespace, model: str, cache: str) -> dict[str, float]:
    """What a process says of itself."""
    command = [sys.executable, __file__, "--begin", str(time.time()), "--cache", cache, "--model", model]
    for name in ("tokens", "method", "ratio"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"A process ended with status {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


def written(folder: Path, published: Path | None = None) -> str:
    """The folder with random weights of these shapes in it, by default Llama-3.1-8B's."""
    from clusterkv_jax.models import registry
    from clusterkv_jax.models.hf_weights import file_shapes, layout
    from clusterkv_jax.planning.shapes import packaged_shapes

    about = folder / "config.json"
    if not about.exists():
        published = published or packaged_shapes()["llama-3.1-8b"]
        config = registry.from_hf(json.loads(published.read_text()))
        folder.mkdir(parents=True, exist_ok=True)
        shapes = file_shapes(layout(config, registry.FAMILIES[config.family].weights))
        write_weights(folder / "model.safetensors", shapes)
        shutil.copy(published, about)
    return str(folder)


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Tensors of bfloat16 that begin with random numbers; holes are the rest, which take no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text, rng = json.dumps(header).encode(), np.random.default_rng(0)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for about in header.values():
            start, stop = about["data_offsets"]
            numbers = rng.standard_normal(min(RANDOM, (stop - start) // 2), dtype=np.float32)
            file.seek(8 + len(text) + start)
            # The upper halves of numbers in float32 are bfloat16.
            file.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model that is there, 'demo' for one; else --folder")
    parser.add_argument("--folder", type=Path, help="where 16 GB of weights are written, if they are not there")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--method", default="centroidkv", help="a preset")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows")
    parser.add_argument("--processes", type=int, default=3, help="one after the other")
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin is not None:
        return child(options)
    if (options.model is None) == (options.folder is None):
        parser.error("give either --model or --folder.")
    model = options.model or written(options.folder)
    print("| process | start to first token, s | start, imports | weights | compiling | request | programs | cached |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1, 1 + options.processes):
            took = run(options, model, cache)
            parts = took["imported"], took["loaded"], took["first"] - took["second"], took["second"]
            numbers = " | ".join(f"{part:.2f}" for part in (sum(parts), *parts))
            print(f"| {number} | {numbers} | {took['programs']} | {took['cached']} |", flush=True)


if __name__ == "__main__":
    main()
