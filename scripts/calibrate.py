"""`clusterkv calibrate` from a checkout: python scripts/calibrate.py --help."""

import sys

from clusterkv_jax.cli import app

if __name__ == "__main__":
    app(["calibrate", *sys.argv[1:]])
