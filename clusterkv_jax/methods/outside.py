"""Methods that other code brings: a class in a Python file, or an entry point of an installed package."""

import hashlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from pathlib import Path

from clusterkv_jax.methods.base import Method
from clusterkv_jax.runtime.errors import shown

# What a package names its methods under: [project.entry-points."clusterkv_jax.methods"] mine = "package.module:Class".
GROUP = "clusterkv_jax.methods"
_MODULE = "clusterkv_jax_method"


def is_class_in_file(name: str) -> bool:
    """Whether a name is of the kind FILE.py:Class."""
    return ".py:" in name


def class_in_file(name: str, folder: Path | None = None) -> type[Method]:
    """The method that a name FILE.py:Class means; the file is executed once for each content.

    Raises ValueError for a file that is not there or fails, and for what is no method in it.
    """
    path, class_name = name.rsplit(":", 1)
    file = (folder or Path()) / Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"There is no file {path}, where --method {shown(name)} looks for a class.")
    module = f"{_MODULE}_{file.stem}_{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    if module not in sys.modules:
        _execute(file, module)
    return _checked(getattr(sys.modules[module], class_name, None), name)


def _execute(file: Path, module: str) -> None:
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(sys.modules[module])
    except Exception as error:
        del sys.modules[module]
        raise ValueError(f"The file {file} fails when it is imported: {type(error).__name__}: {error}") from error


def installed() -> dict[str, EntryPoint]:
    """The methods of installed packages by name; none is imported yet."""
    return {point.name: point for point in entry_points(group=GROUP)}


def class_of(point: EntryPoint) -> type[Method]:
    """The method of an entry point. Raises ValueError for one that fails or is no method."""
    try:
        found = point.load()
    except Exception as error:
        raise ValueError(
            f"Method {point.name!r} of an installed package fails when it is imported: {type(error).__name__}: {error}"
        ) from error
    return _checked(found, point.value)


def _checked(found: object, name: str) -> type[Method]:
    if isinstance(found, type) and issubclass(found, Method) and not isabstract(found):
        if "__dataclass_fields__" in vars(found):
            return found
        raise ValueError(f"{name} must be decorated with @dataclass(frozen=True), as every method is.")
    raise ValueError(f"{name} must be a class derived from clusterkv_jax.methods.Method, such as an Eviction.")


def origin(method: Method) -> str | None:
    """The file's name and digest of a method that a file brought: what its answers depend on beside its fields."""
    module = type(method).__module__
    return module.removeprefix(f"{_MODULE}_") if module.startswith(_MODULE) else None
