"""The table of families: tests go through it, and docs/reference/models.md is made of it."""

from tests.support.checkpoint_files import FAMILIES, LLAMA

PUBLISHED = {"llama": LLAMA} | FAMILIES
