"""`clusterkv evaluate` from a checkout: python scripts/evaluate.py --help."""

import sys

from clusterkv_jax.cli import app

if __name__ == "__main__":
    app(["evaluate", *sys.argv[1:]])
