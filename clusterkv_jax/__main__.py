"""`python -m clusterkv_jax` is the `clusterkv` command."""

from runpy import run_module

if __name__ == "__main__":
    run_module("clusterkv_jax.cli", run_name="__main__")
