"""How much memory of the host a GGUF file takes while it is loaded: a file of 4 GB in Q8_0, in the shapes of an 8B.

    python scripts/studies/gguf_memory.py FOLDER

FOLDER gets the file, which processes of their own load, once with its codes and once as numbers in bfloat16. The file
does not stay.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BYTES = 4e9
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
OF_A_LAYER = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
LOAD = """
import resource
import sys
import jax
import clusterkv_jax as ckv
model = ckv.load(sys.argv[1], dtype="bfloat16", weights=sys.argv[2])
print(sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(model.params))))
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def main(folder: Path) -> None:
    """Print bytes of the file, of the parameters, and the most that each process had."""
    file = folder / "memory.gguf"
    try:
        write(file)
        print(f"file {file.stat().st_size / 1e9:.2f} GB")
        for weights in ("stored", "dequantised"):
            command = [sys.executable, "-c", LOAD, str(file), weights]
            loaded = subprocess.run(command, check=True, capture_output=True, text=True)
            parameters, most = map(int, loaded.stdout.split())
            sizes = f"parameters {parameters / 1e9:.2f} GB, most memory {most / 1e9:.2f} GB"
            print(f"{weights}: {sizes}, {most / parameters:.2f} times as much")
    finally:
        file.unlink(missing_ok=True)


def write(file: Path) -> None:
    """As many layers of random codes as 4 GB need."""
    blocks = random_blocks(VOCABULARY * HIDDEN)
    fixed = 2 * blocks.nbytes
    layer = sum(rows * columns for rows, columns in OF_A_LAYER.values()) // 32 * 34
    layers = math.ceil((BYTES - fixed) / layer)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("token_embd", "output"):
        put(writer, f"{name}.weight", blocks, (VOCABULARY, HIDDEN))
    for number in range(layers):
        for name, shape in OF_A_LAYER.items():
            put(writer, f"blk.{number}.{name}.weight", blocks, shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(numbers: int) -> np.ndarray:
    """Blocks of 32 numbers: a scale of 16 bits, and a code of 8 bits each."""
    blocks = np.random.default_rng(0).integers(0, 256, (numbers // 32, 34), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    return blocks


def put(writer: Any, name: str, blocks: np.ndarray, shape: tuple[int, int]) -> None:
    """A matrix of the first codes there are."""
    rows, columns = shape
    raw = blocks[: rows * columns // 32].reshape(rows, columns // 32 * 34)
    writer.add_tensor(name, raw, raw_dtype=Q8_0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
