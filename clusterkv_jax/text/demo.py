"""The text and the question of the first example."""

from importlib import resources

FILE = resources.files("clusterkv_jax.configs") / "demo" / "mast_head.txt"
QUESTION = "What is the special magic number for amber-lantern mentioned in the provided text?"


def demo_text() -> str:
    """A chapter of *Moby-Dick*, 4,002 tokens of the demo model, in which a magic number is hidden."""
    return FILE.read_text(encoding="utf-8")
