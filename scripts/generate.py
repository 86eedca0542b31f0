"""`clusterkv generate` from a checkout: python scripts/generate.py --help."""

import sys

from clusterkv_jax.cli import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
