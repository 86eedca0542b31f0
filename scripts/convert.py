"""`clusterkv convert` from a checkout: python scripts/convert.py --help."""

import sys

from clusterkv_jax.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
