"""A calibration as a file: YAML to read and edit, safetensors with the surrogate too; in a bucket or on the hub."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from msgspec import Struct
from safetensors.numpy import save_file

from clusterkv_jax.calibration.measured import PARTS, SURROGATES, Calibration
from clusterkv_jax.storage import hub, schema
from clusterkv_jax.storage.buckets import place, there
from clusterkv_jax.storage.digests import all_finite, digest
from clusterkv_jax.storage.files import replacing, write_whole
from clusterkv_jax.storage.schema import AnyPath
from clusterkv_jax.storage.weight_files import header

# Bytes of a file's numbers as YAML, 160 for each head: that of OPT-66B has 740 KiB, which are read in some 3 s.
MOST_NUMBERS = 2 * schema.MIB

# Of a safetensors file's metadata.
_ENTRY = "calibration"
# What a calibration is called in a folder.
_FILES = (hub.CALIBRATION, "calibration.yaml")
_KEYS = [field.name for field in dataclasses.fields(Calibration) if field.name != "surrogate"]


def to_yaml(calibration: Calibration) -> str:
    """The text of a calibration file, a line per layer."""
    return yaml.safe_dump(_numbers(calibration), sort_keys=False, default_flow_style=None, width=10**6)


def _numbers(calibration: Calibration) -> dict[str, Any]:
    """Everything but the surrogate, as a file has it."""
    numbers = {name: getattr(calibration, name) for name in _KEYS} | {"settings": dict(calibration.settings)}
    if isinstance(calibration.auto, tuple):
        numbers["auto"] = [dataclasses.asdict(at) for at in calibration.auto]
    if calibration.auto is None:  # as files have it that are older than the field, and with it their fingerprint
        del numbers["auto"]
    return _lists(numbers)


def fingerprint(calibration: Calibration) -> str:
    """Tells a calibration from every other one, its surrogate included."""
    arrays = [digest(np.asarray(x, np.float32)) for layer in calibration.surrogate or () for x in layer.values()]
    return hashlib.sha256(json.dumps([_numbers(calibration), arrays]).encode()).hexdigest()


def write(file: str | Path, calibration: Calibration) -> None:
    """A `.yaml` file of everything but the surrogate, or a `.safetensors` file of everything.

    Raises ValueError, and writes nothing, for what `read` would not take.
    """
    file, numbers = Path(file), to_yaml(calibration)
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(
            f"The calibration of {calibration.model} has {len(numbers):,} bytes of numbers, and at most "
            f"{MOST_NUMBERS:,} are read; nothing was written to {file}."
        )
    if file.suffix != ".safetensors":
        write_whole(file, numbers)
        return
    if calibration.surrogate is None:
        raise ValueError(
            f"The calibration of {calibration.model} has no surrogate to write to {file}; name a .yaml file."
        )
    arrays = {f"{i}.{name}": x for i, layer in enumerate(calibration.surrogate) for name, x in layer.items()}
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}
    # One entry: the library writes several in any order, and the same calibration is the same file.
    about = {"numbers": numbers, "checksums": {name: digest(x) for name, x in arrays.items()}}
    with replacing(file) as temporary:
        save_file(arrays, temporary, metadata={_ENTRY: json.dumps(about)})


def push(
    calibration: Calibration | str | os.PathLike[str],
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = False,
) -> str:
    """Put a calibration, or what `read` takes, into a model's repository on the hub; returns the commit's address.

    It becomes `calibration.safetensors` there, or `calibration.yaml` without a surrogate, and `repo_id` is then what
    `load` and `--calibration` take. In the model's own repository it is loaded with the model. A repository or branch
    that does not exist is made.

    Raises ValueError, in one sentence, for what is no calibration, and where the hub refuses it.
    """
    measured = calibration if isinstance(calibration, Calibration) else read(calibration)
    named = hub.parse(repo_id, revision) if isinstance(repo_id, str) else None
    if named is None:
        raise ValueError(f"repo_id must be a hub id 'owner/name', got {repo_id!r}.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _FILES[measured.surrogate is None]
        write(file, measured)
        return hub.upload(file, named[0], revision=named[1], private=private)


def _located(name: str | os.PathLike[str]) -> AnyPath:
    """The file of a calibration that is a file, a folder that holds it, an address of either, or a hub id."""
    path = place(name)
    if isinstance(path, Path) and not path.exists() and path.suffix not in (".safetensors", ".yaml", ".yml"):
        named = hub.parse(str(name))
        if named is None:
            raise FileNotFoundError(f"There is no calibration at {name}.")
        try:
            path = hub.snapshot(*named, _FILES)
        except ValueError as error:
            raise ValueError(f"There is no file {name}, and the hub did not deliver a calibration: {error}") from error
    if isinstance(path, Path) and not path.exists():
        raise FileNotFoundError(f"There is no calibration at {name}.")
    if not isinstance(path, Path) and not there(path):
        raise ValueError(f"There is no calibration at {name}.")
    if not path.is_dir():
        return path
    found = [path / name for name in _FILES if (path / name).is_file()]
    if not found:
        raise ValueError(f"{name} holds no calibration, neither {_FILES[0]} nor {_FILES[1]}.")
    return found[0]


def read(file: str | os.PathLike[str]) -> Calibration:
    """Read what `write` wrote: a file, a folder that holds one, a gs:// address of either, or a hub id, "owner/name" or
    "owner/name@revision".

    Raises FileNotFoundError if there is no such file here, and ValueError, naming the file and the key, if it is none
    that `write` wrote.
    """
    file = _located(file)
    if file.suffix != ".safetensors":
        return _parsed(schema.read_text(file, most=MOST_NUMBERS), str(file))
    entries, metadata = header(file)
    if _ENTRY not in metadata:
        raise ValueError(f"{file} is no calibration: its metadata lack {_ENTRY!r}.")
    about = schema.checked(schema.from_json(metadata[_ENTRY], str(file)), _About, str(file))
    if len(about.numbers) > MOST_NUMBERS:
        raise ValueError(f"{file} is no calibration: its numbers are larger than {schema.size(MOST_NUMBERS)}.")
    calibration, checksums = _parsed(about.numbers, str(file)), about.checksums
    arrays = {name: np.array(entry.map()) for name, entry in entries.items()}
    for name, x in arrays.items():
        if digest(x) != checksums.get(name) or not all_finite(x):
            raise ValueError(f"{file} is damaged: {name!r} has not the numbers that were written.")
    if checksums.keys() - arrays:
        raise ValueError(f"{file} is damaged: it lacks {min(checksums.keys() - arrays)!r}.")
    layers, heads = len(calibration.head_shares), len(calibration.head_shares[0])
    parts = "linear" if len(arrays) == 2 * layers else "mlp"
    if arrays.keys() != {f"{number}.{part}" for number in range(layers) for part in SURROGATES[parts]}:
        raise ValueError(f"{file} must hold the arrays {', '.join(SURROGATES[parts])} of {layers} layers.")
    surrogate = tuple({part: arrays[f"{i}.{part}"] for part in SURROGATES[parts]} for i in range(layers))
    for number, layer in enumerate(surrogate):
        shapes = [x.shape or (0,) for x in layer.values()]
        chain = [shape[0] for shape in shapes[2::2]] + [heads]  # what each array of weights must put out
        if any(
            len(w) != 2 or w[1:] != b or b != (n,) for w, b, n in zip(shapes[::2], shapes[1::2], chain, strict=True)
        ):
            raise ValueError(f"{file}, layer {number}: The shapes {shapes} make no surrogate of {heads} KV heads.")
    return dataclasses.replace(calibration, surrogate=surrogate)


class _About(Struct):
    """A safetensors file's metadata: the text of a YAML file, and digests of its arrays."""

    numbers: str
    checksums: dict[str, str]


def _parsed(text: str, file: str) -> Calibration:
    content = schema.from_yaml(text, file)
    schema.check_keys(content, _KEYS, file)
    calibration = schema.checked(content, Calibration, file)
    layers, heads = len(calibration.outlier_share), len((calibration.outlier_share or ((),))[0])
    for name in ("outlier_share", "head_shares", "least_scores", "explained"):
        table = getattr(calibration, name)
        if table is not None and (not heads or [len(row) for row in table] != [heads] * layers):
            raise ValueError(
                f"{file}, field {name!r}: A number is needed for each of {heads} heads in {layers} layers."
            )
    for layer, head in calibration.outlier_heads:
        if layer >= layers or head >= heads:
            raise ValueError(
                f"{file}, field 'outlier_heads': There are {layers} layers of {heads} heads, got {[layer, head]}."
            )
    least = calibration.least_scores
    if least is not None and not all(_rise(numbers) for layer in least for numbers in layer):
        raise ValueError(f"{file}, field 'least_scores': {len(PARTS)} numbers that rise are needed for each head.")
    return calibration


def _rise(numbers: tuple[float, ...]) -> bool:
    return len(numbers) == len(PARTS) and all(np.diff(numbers) >= 0)


def _lists(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, tuple | list) else tree
