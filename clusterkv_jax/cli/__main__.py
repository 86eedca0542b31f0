"""`python -m clusterkv_jax.cli` is the `clusterkv` command."""

from clusterkv_jax.cli import main

if __name__ == "__main__":
    main()
