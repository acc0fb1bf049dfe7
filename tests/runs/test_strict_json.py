"""JSON of strangers is parsed as the standard library does, or refused with a reason."""

import json
import random

import pytest

from jaxmux.specifications.strict_json import LARGEST_INTEGER, parse_object, shown

MOST = 10_000
# What is wrong, and a part of the message.
MALFORMED = {
    "not a number": ('{"a": NaN}', "holds NaN"),
    "infinity": ('{"a": -Infinity}', "holds -Infinity"),
    "beyond float64": ('{"a": 1e999}', "holds Infinity; expected a number of at most"),
    "huge integer": ('{"a": ' + "9" * 5000 + "}", "holds Infinity"),
    "inexact integer": (f'{{"a": {LARGEST_INTEGER + 1}}}', "2^53 - 1"),
    "inexact number": (f'{{"a": {LARGEST_INTEGER + 1}.0}}', "2^53 - 1"),
    "inner number": ('{"a": {"b": [1, 1e999]}}', '"a.b" holds Infinity'),
    "long key": ('{"' + "a" * 5000 + '": NaN}', "a…"),
    "key twice": ('{"rank": 1, "rank": 2}', 'names the key "rank" twice'),
    "inner key twice": ('{"a": {"b": 1, "b": 1}}', 'names the key "b" twice'),
    "key twice by escapes": ('{"a": 1, "\\u0061": 2}', 'names the key "a" twice'),
    "a list": ("[1]", "should be a JSON object, found [1]"),
    "a text": ('"task"', 'should be a JSON object, found "task"'),
    "nothing": ("", "is no JSON: Expecting value, line 1, column 1"),
    "two documents": ("{}\n{}", "is no JSON: Extra data, line 2, column 1"),
    "comment": ('{"a": 1} // why', "is no JSON"),
    "gin": ("Task.name = 'a'", "is no JSON"),
    "deep lists": ("[" * 5000, "nests 5000 objects and lists; expected at most 8"),
    "deep objects": ('{"a":' * 9 + "1" + "}" * 9, "nests 9 objects and lists"),
    "half a pair": ('{"a": "\\ud800"}', "half of a surrogate pair"),
    "half a pair in a key": ('{"\\udfff": 1}', "half of a surrogate pair"),
    "half a pair in a list": ('{"a": ["\\udfff"]}', "half of a surrogate pair"),
    "half a pair in Python": ('{"a": "\ud800"}', "should be UTF-8"),
    "control character": ('{"a": "\x00"}', "is no JSON: Invalid control character"),
    "byte order mark": ("\ufeff{}", "is no JSON: Unexpected UTF-8 BOM"),
    "Latin-1": (b'{"a": "\xe9"}', "should be UTF-8: "),
    "UTF-16": ("{}".encode("utf-16"), "should be UTF-8"),
    "too large": ("{" + " " * MOST + "}", f"has more than {MOST} bytes"),
    "too large in bytes": ('{"a": "' + "é" * (MOST // 2) + '"}', f"more than {MOST} bytes"),
}


@pytest.mark.parametrize(("text", "problem"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_documents_are_refused(text, problem):
    with pytest.raises(ValueError) as error:
        parse_object(text, MOST)
    assert problem in str(error.value)
    assert len(str(error.value)) < 250


def test_brackets_and_quotes_in_strings_do_not_nest():
    document = {"a": "[" * 50 + '\\"' * 3 + "{" * 50, '"[{\\': ["]"]}
    assert parse_object(json.dumps(document), MOST) == document


def test_random_documents_are_parsed_as_by_the_standard_library():
    rng = random.Random(0)

    def value(depth: int):
        kinds = [None, True, 0, -5, 0.1, 1e-300, "", 'a"\\b', "日本🙂", "\n"]
        if depth == 0 or rng.random() < 0.5:
            return rng.choice(kinds)
        inner = [value(depth - 1) for _ in range(rng.randrange(4))]
        return inner if rng.random() < 0.5 else {f"{i}{v!r}": v for i, v in enumerate(inner)}

    for _ in range(300):
        document = {"a": value(5), "b": value(6)}
        text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
        assert parse_object(text if rng.random() < 0.5 else text.encode(), 10**6) == document


def test_damaged_documents_are_parsed_alike_or_refused():
    rng = random.Random(1)
    text = json.dumps({"name": "a", "adapter": {"rank": 4, "names": ["x", "y\\"]}, "rate": 1.5e-4})
    for _ in range(3000):
        damaged = list(text)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(damaged))
            damaged[place] = rng.choice(["", '"', "\\", "[", "}", "9", "e", "\x00", "é", "\udc80"])
        damaged = "".join(damaged)
        try:
            found = parse_object(damaged, MOST)
        except ValueError:
            continue
        assert found == json.loads(damaged)


def test_long_values_are_cut_in_messages():
    assert shown({"a": 1}) == '{"a": 1}'
    assert len(shown("x" * 10_000)) < 100
    assert shown("\x1b[31m\u202e") == '"\\u001b[31m\\u202e"'
