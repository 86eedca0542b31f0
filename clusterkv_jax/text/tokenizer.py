"""The one door to tokenizers: loading, text to ids, ids to text. Whatever a library does, bad input is one sentence."""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs

from clusterkv_jax.storage.schema import MIB, from_json, read_text, shown, size
from clusterkv_jax.text import guard

Tokens = list[int]
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
# The largest published tokenizer.json has 34 MB.
MOST_BYTES = 128 * MIB
# SentencePiece's sign for a space.
_SPACE = "\u2581"
# What else a tokenizer is made of.
_BESIDE = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")


def tokenizer_in(folder: Path, *, trusted: bool = False) -> Any:
    """The tokenizer of a local folder, or None where it has none.

    A tokenizer.json that is not `trusted` is first tried in a process of its own, once: the user's cache folder
    remembers which have passed.

    Raises ValueError naming the file at fault.
    """
    files = [folder / name for name in (*FILES, *_BESIDE) if (folder / name).is_file()]
    found = [file.name for file in files if file.name in FILES]
    if not found:
        return None
    for file in files:
        if (nbytes := file.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{file} has {nbytes:,} bytes, and tokenizers are read up to {size(MOST_BYTES)}.")
    try:
        if not trusted and "tokenizer_config.json" in found:
            _check_names(folder / "tokenizer_config.json")
        if not trusted and "tokenizer.json" in found:
            _try_once(folder / "tokenizer.json")
        with guard.panics_caught():
            tokenizer = _load(folder)
    except Exception as error:  # its parsers raise whatever they meet
        if "tokenizer.json" in found:
            raise ValueError(f"{folder / 'tokenizer.json'} makes no tokenizer: {shown(error)}.") from error
        # Other files need libraries that may be missing, and a model serves token ids without them.
        warnings.warn(f"The tokenizer in {folder} could not be loaded, so tokenizer is None: {error}", stacklevel=3)
        return None
    tokenizer.clean_up_tokenization_spaces = False  # what was shown would change with what follows
    return tokenizer


def _check_names(file: Path) -> None:
    """Raise ValueError where another file would be taken for tokenizer.json, which nobody has tried."""
    if "fast_tokenizer_files" in from_json(read_text(file, most=MOST_BYTES), str(file), finite=False):
        raise ValueError(f"{file} names fast_tokenizer_files; the tokenizer must be tokenizer.json.")


def _load(folder: Path) -> Any:
    with guard.advice_silenced():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _try_once(file: Path) -> None:
    """Raise ValueError if a tokenizer.json is too much for a process of its own."""
    raw = file.read_bytes()
    name = hashlib.sha256(metadata.version("tokenizers").encode() + raw).hexdigest()
    passed = platformdirs.user_cache_path("clusterkv_jax", appauthor=False) / "tokenizers" / name
    if passed.exists():
        return
    guard.ask("try", file=str(file), nbytes=len(raw))
    with contextlib.suppress(OSError):  # a cache that cannot be written to is none
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def encode(
    tokenizer: Any, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False
) -> Tokens:
    """Ids of a text. `add_special_tokens` puts what begins a text before it, unless it is there.

    Args:
        tokenizer: of transformers, or what encodes and decodes as those do.
        text: any.
        add_special_tokens: whether a beginning, and what the tokenizer puts at an end, is wanted.
        split_special_tokens: read the names of special tokens, such as "<|im_end|>", as the letters that they are.

    Raises ValueError in one sentence for what the tokenizer cannot encode.
    """
    check_whole(text, "A text")
    options = {"split_special_tokens": True} if split_special_tokens else {}
    if hasattr(tokenizer, "model_max_length"):  # those of transformers warn of what they call long
        options["verbose"] = False
    with _naming(tokenizer):
        begins = add_special_tokens and not has_beginning(tokenizer, text)
        return list(tokenizer.encode(text, add_special_tokens=begins, **options))


def check_whole(text: str, name: str) -> None:
    """Raise ValueError for a text with half of a character, as Python makes it of bytes that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a character, {text[error.start]!r}; give whole ones.") from None


def has_beginning(tokenizer: Any, text: str) -> bool:
    """Whether a text begins with the names of the tokens that the tokenizer puts before texts."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    ids = tokenizer.encode("a", add_special_tokens=True)
    count = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
    names = tokenizer.decode(ids[:count])
    return bool(names) and text.startswith(names)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens without special ones, as it stands behind other text: SentencePiece's decoders drop a first
    space, which is kept here. Without a tokenizer there is none.

    Raises ValueError in one sentence for what the tokenizer cannot decode.
    """
    if tokenizer is None:
        return ""
    with _naming(tokenizer):
        text = _plain(tokenizer, tokens)
        first = next((token for token in tokens if not _is_special(tokenizer, token)), None)
        if first is None or not _piece(tokenizer, first).startswith(_SPACE):
            return text
        # What follows another token is whole.
        return _plain(tokenizer, [first, *tokens])[len(_plain(tokenizer, [first])) :]


def without_open_end(tokenizer: Any, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens before the last run of bytes, whose text a next byte may change from its beginning on."""
    count = len(tokens)
    with _naming(tokenizer):
        while count and (_is_byte(_piece(tokenizer, tokens[count - 1])) or _is_special(tokenizer, tokens[count - 1])):
            count -= 1
    return tokens[:count]


def _plain(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def _piece(tokenizer: Any, token: int) -> str:
    return tokenizer.convert_ids_to_tokens(token) or "" if hasattr(tokenizer, "convert_ids_to_tokens") else ""


def _is_special(tokenizer: Any, token: int) -> bool:
    """Whether a token is left out of texts."""
    return not _piece(tokenizer, token).startswith(_SPACE) and not _plain(tokenizer, [token])


def _is_byte(piece: str) -> bool:
    """Whether a piece of a vocabulary stands for a byte, as "<0xF0>" does."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


@contextmanager
def _naming(tokenizer: Any) -> Iterator[None]:
    """What a tokenizer's files make it raise, which may be anything, as a ValueError."""
    try:
        with guard.panics_caught():
            yield
    except Exception as error:
        name = os.fspath(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        raise ValueError(f"The tokenizer of {name!r} fails: {shown(error)}.") from error
