"""How a method's rows are stored: the setting that all methods have, whatever they keep."""

import typing
from abc import ABC
from dataclasses import dataclass, fields
from typing import Any

from typing_extensions import override

from clusterkv_jax.kernels.quantised import CacheDtype
from clusterkv_jax.runtime.errors import check_fields, is_one_of

_NAMES = typing.get_args(CacheDtype)


@dataclass(frozen=True, kw_only=True)
class Storage(ABC):  # noqa: B024, the base of an abstract class
    """A base of settings; those of a method come before these where they are given by place.

    `cache_dtype` is what keys and values are stored in (see `kernels.quantised`); None is the model's own type. A row
    is quantised when it is written, and again only if it changes.
    """

    cache_dtype: CacheDtype | None = None

    def __post_init__(self) -> None:
        allowed = f"one of {', '.join(map(repr, _NAMES))} or None"
        check_fields(self, ("cache_dtype", is_one_of(self.cache_dtype, *_NAMES, None), allowed))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Storage.__repr__  # or every dataclass would make its own

    @override
    def __repr__(self) -> str:
        """As a dataclass is shown, with the settings that are given by name alone last, and only where they differ from
        their defaults: saved caches and runs name their method so.
        """
        by_place = [field.name for field in fields(self) if field.repr and not field.kw_only]
        changed = [field.name for field in fields(self) if field.kw_only and getattr(self, field.name) != field.default]
        shown = [*by_place, *changed]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
