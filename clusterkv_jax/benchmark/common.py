"""What all sides share: the prompts."""

import numpy as np


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """The same tokens for every side."""
    return np.random.default_rng(0).integers(0, vocabulary, length).tolist()
