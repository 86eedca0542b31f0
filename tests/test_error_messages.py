"""An error is a sentence: it begins with a capital letter, a value or a name of the code, and ends with a full stop."""

import ast
import re
from pathlib import Path

import clusterkv_jax

PACKAGE = Path(clusterkv_jax.__file__).parent
# What another error says, as a sentence, may stand at the end.
QUOTED = re.compile(r"\{[^{}]*\berrors?\b[^{}]*\}$")


def raised():
    """Every text raised in the package, with values as {code}: the place, the text, the names known there."""
    for folder in ("", "kernels", "models"):  # which are links, and globs do not follow them
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            for scope in ast.parse(file.read_text()).body:
                for node in ast.walk(scope):
                    if isinstance(node, ast.Raise) and (text := text_of(node.exc)) is not None:
                        yield f"{file.relative_to(PACKAGE)}:{node.lineno}", text, names_in(scope)


def text_of(node):
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "" for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return text_of(template)
        case ast.Call(args=[message, *_]):
            return text_of(message)
    return None


def names_in(scope):
    """Parameters, variables, fields and attributes of a function or class."""
    keys = {ast.arg: "arg", ast.Name: "id", ast.Attribute: "attr"}
    return {getattr(node, keys[type(node)]) for node in ast.walk(scope) if type(node) in keys}


def fault(text, names):
    word = re.match(r"[a-z][\w.]*", text)
    if word and word[0] not in names and not re.search(r"[_.=]", text.split()[0]):
        return "begins with a small letter"
    return None if text.endswith(".") or QUOTED.search(text) else "ends without a full stop"


def test_errors_are_sentences():
    messages = list(raised())
    assert len(messages) > 150
    assert [f"{place} {wrong}: {text}" for place, text, names in messages if (wrong := fault(text, names))] == []


def test_what_is_no_sentence_is_found():
    assert fault("limit must be at least 1, got {limit}.", {"limit"}) is None
    assert fault("Key {key} of {where}: {error}", set()) is None
    assert fault("the limit must be at least 1.", {"limit"}) == "begins with a small letter"
    assert fault("There is no limit", set()) == "ends without a full stop"
