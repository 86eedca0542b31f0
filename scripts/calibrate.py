"""`clusterkv calibrate` from a checkout: python scripts/calibrate.py --help."""

import sys

from clusterkv_jax.cli import main

if __name__ == "__main__":
    main(["calibrate", *sys.argv[1:]])
