"""What rows of a cache are worth, as pure functions: scores that are learned, and scores that reconstruct.

    expected_attention      what queries of the future will attend to             2510.00636
    reconstruction          what a model looks at that repeats its context        KVzip 2505.23416, KVzip+ 2601.07891
    surrogate(_mlp)         that, predicted from what enters the attention        KVzap 2601.07891
    keydiff, lagkv          how keys and values differ from the others            2504.15364, 2504.04704
    compactor               leverage of keys, and attention inside chunks         2507.08143
    criticalkv, dropkv      what a row does to the layer's output                 2502.03805, OpenReview MqfNzH3TVH
    match, refit            rows, biases and values fitted to attention           2602.16284

Scores are float32 and more is more; of equal ones the first row is the better one. Sequences may have unequal
`lengths`: what lies beyond them never matters, and gets -inf. Everything may be jitted, with numbers, names and a
model's configuration static.
"""

from clusterkv_jax.learned.attention_matching import match
from clusterkv_jax.learned.expected import expected_attention
from clusterkv_jax.learned.fit_rows import refit
from clusterkv_jax.learned.leverage import compactor, draw_sketch
from clusterkv_jax.learned.output import criticalkv, dropkv, projected_norms
from clusterkv_jax.learned.repetition import instruction, reconstruction
from clusterkv_jax.learned.statistics import keydiff, lagkv
from clusterkv_jax.learned.surrogates import surrogate, surrogate_mlp

__all__ = [
    "compactor",
    "criticalkv",
    "draw_sketch",
    "dropkv",
    "expected_attention",
    "instruction",
    "keydiff",
    "lagkv",
    "match",
    "projected_norms",
    "reconstruction",
    "refit",
    "surrogate",
    "surrogate_mlp",
]
