"""The maps in docs/develop are the tree's: every room and module once, on the floor that its imports give it."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

import clusterkv_jax
from clusterkv_jax.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "clusterkv_jax"
PAGES = [(ROOT / "docs" / "develop" / page).read_text(encoding="utf-8") for page in ("architecture.md", "modules.md")]
ROWS = re.findall(r"^\| (\d+) \| `([^`]+)` \|", "\n".join(PAGES), re.MULTILINE)
MAP = {room: int(floor) for floor, room in ROWS}


def files():
    """Modules as paths inside the package; `models` and `kernels` are links."""
    inside = [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]
    linked = [
        PACKAGE / path.relative_to(ROOT) for part in ("models", "kernels") for path in (ROOT / part).rglob("*.py")
    ]
    return sorted({str(path.relative_to(PACKAGE)) for path in inside + linked})


def imports(file):
    """The modules that a file imports, as paths inside the package."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import) and any(name.name == "clusterkv_jax" for name in node.names):
            yield "__init__.py"
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("clusterkv_jax"):
            continue
        for name in node.names:
            parts = [*node.module.split("."), name.name][1:]
            options = ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"]))
            options += ("/".join(parts[:-1]) + ".py", "/".join([*parts[:-1], "__init__.py"]).lstrip("/"))
            yield next(path for path in options if (PACKAGE / path).exists())


def room_of(file, folder):
    """The room of this folder's table that a file belongs to, or None outside the folder."""
    if not file.startswith(folder):
        return None
    first, *rest = file.removeprefix(folder).split("/")
    return f"{folder}{first}/" if rest else f"{folder}{first}"


@cache
def floors(folder):
    """The floor of each room of a folder: one above the highest that it imports."""
    below = {}
    for file in files():
        if (room := room_of(file, folder)) is not None:
            others = {room_of(other, folder) for other in imports(file)}
            below.setdefault(room, set()).update(others - {room, None})

    def floor(room, path=()):
        assert room not in path, f"a circle: {' -> '.join((*path, room))}"
        return 1 + max((floor(other, (*path, room)) for other in below[room]), default=0)

    return {room: floor(room) for room in below}


FOLDERS = sorted({"", *(f"{Path(file).parts[0]}/" for file in files() if "/" in file)})


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_shows_every_room_on_its_floor(folder):
    drawn = {room: floor for room, floor in MAP.items() if room != folder and room_of(room, folder) == room}
    assert drawn == floors(folder)


def test_the_map_names_a_room_once():
    assert len(ROWS) == len(MAP)


def test_the_house_has_twelve_floors_at_most():
    assert max(floors("").values()) <= 12


def test_public_names_are_imported_from_where_the_types_say():
    """`clusterkv_jax` names each twice: for type checkers, and for the import when it is first used."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    branch = next(branch.body for branch in tree.body if isinstance(branch, ast.If))
    typed = {
        alias.asname: f"{node.module.removeprefix('clusterkv_jax')}.{alias.name}".lstrip(".")
        for node in branch
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    typed |= {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in branch if isinstance(node, ast.Assign)}
    assert sorted({*typed, *METHODS}) == sorted(clusterkv_jax.__all__)
    assert {name: home for name, home in typed.items() if "." in home} == clusterkv_jax._HOMES
    assert set(typed) <= set(dir(clusterkv_jax))
    for name, home in typed.items():
        assert getattr(clusterkv_jax, name) is not None, home
    for name, method in METHODS.items():
        assert getattr(clusterkv_jax, name) is method
    assert clusterkv_jax.kmeans.cluster  # a module that nobody imported by name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = clusterkv_jax.nothing_like_it


@pytest.mark.parametrize("name", ["conversion.convert", "host_store.host_bytes", "host_store.traffic"])
def test_earlier_paths_lead_to_the_same_functions(name):
    module, function = name.split(".")
    home = {"conversion": "checkpoints.convert", "host_store": "cache.host_store"}[module]
    found = getattr(importlib.import_module(f"clusterkv_jax.{module}"), function)
    assert found is getattr(importlib.import_module(f"clusterkv_jax.{home}"), function)


def taken_from(module, file):
    """The names that a file imports from a module."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return {name.name for node in found for name in node.names}


def products(file):
    """The products of arrays that a file asks for."""
    kinds = {"einsum", "matmul", "dot", "dot_general", "tensordot", "ragged_dot"}
    tree = list(ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))))
    signs = [node for node in tree if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)]
    return signs + [node for node in tree if isinstance(node, ast.Attribute) and node.attr in kinds]


def test_blocks_and_kernels_alone_choose_by_the_platform():
    above = [file for file in files() if not file.startswith(("runtime/", "kernels/", "blocks/"))]
    asking = {
        file for file in above if taken_from("clusterkv_jax.runtime.dispatch", file) & {"platform", "device_kind"}
    }
    assert not asking  # the others know `Traits`


def accelerators_asked_for(file):
    """How often a file compares the platform with the name of an accelerator."""
    tree = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
    parts = [(node.left, *node.comparators) for node in tree if isinstance(node, ast.Compare)]
    calls = [any(isinstance(x, ast.Call) and getattr(x.func, "id", "") == "platform" for x in each) for each in parts]
    names = [any(getattr(x, "value", "") in ("gpu", "tpu") for x in each) for each in parts]
    return sum(call and name for call, name in zip(calls, names, strict=True))


def test_dispatch_alone_chooses_an_implementation():
    """Blocks, and the ops of kernels, know the platform by sizes alone, and a CPU whose compiler wants other loops."""
    ops = [file for file in files() if file.startswith("blocks/") or file.endswith("__init__.py")]
    assert not [file for file in ops if accelerators_asked_for(file)]
    assert accelerators_asked_for("runtime/control_flow.py")  # which this test would tell


def kinds_of_caches_asked(file):
    """Whether a file asks which kind of cache it has."""
    kinds = {"LayerCache", "HeadGroups", "PagedHeads", "WindowCache", "Layer", "Group"}
    tree = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
    calls = [node for node in tree if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"]
    return any(kinds & {leaf.id for leaf in ast.walk(call) if isinstance(leaf, ast.Name)} for call in calls)


def test_the_room_of_caches_alone_asks_for_their_kinds():
    """What differs between kinds is a function of `cache.kinds`."""
    asking = {file for file in files() if not file.startswith("cache/") and kinds_of_caches_asked(file)}
    assert not asking


def test_linear_alone_multiplies_with_weights():
    with_weights = [file for file in files() if file.startswith(("blocks/", "models/", "training/"))]
    found = {file for file in with_weights if products(file)}
    assert found == {"blocks/linear.py", "blocks/causal_attention.py", "blocks/tiled_attention.py"}


def lines_of_functions(file):
    """Lines of each function behind its docstring, by name."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_fit_a_screen():
    """But those that list the options of a command."""
    package = [file for file in files() if not file.startswith("cli/")]
    assert not [(file, name, lines) for file in package for name, lines in lines_of_functions(file) if lines > 60]
    assert max(lines for _, lines in lines_of_functions("cli/generate.py")) > 60  # which this test would tell


def test_a_step_is_read_in_five_files():
    """The decode loop, the decoder, the protocol, a method and what kinds of caches do."""
    path = "decoding/__init__.py", "models/decoder.py", "methods/base.py", "methods/knorm.py", "cache/kinds.py"
    lines = [len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in path]
    assert sum(lines) <= 600
    assert lines[1] <= 80


def test_a_word_has_one_type():
    """Classes of all rooms but those whose names are of other people's formats."""
    ours = [file for file in files() if not file.startswith(("serve/", "models/"))]
    trees = [(file, ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) for file in ours]
    names = [(node.name, file) for file, tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    words = [name for name, _ in names if not name.startswith("_")]
    assert len(words) > 200
    assert not {name: [file for other, file in names if other == name] for name in words if words.count(name) > 1}
