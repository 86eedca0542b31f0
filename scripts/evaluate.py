"""`clusterkv evaluate` from a checkout: python scripts/evaluate.py --help."""

import sys

from clusterkv_jax.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
