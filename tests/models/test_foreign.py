"""What others wrote is made harmless where it comes in."""

import json

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import printable, printable_lines, read_json, sanitized


@pytest.mark.parametrize("text", ["", "vgg-11 (2 ranks)", "größer", "日本語", "🙂", "a\\x1b", "[bold]"])
def test_what_can_be_read_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("\x9b2J\x85\u2028", r"\x9b2J\x85\u2028"),
        ("a\u202eb\u2066\u200b\ufeff", r"a\u202eb\u2066\u200b\ufeff"),
        ("\udcff\U000e0041", r"\udcff\U000e0041"),
    ],
)
def test_what_commands_turns_or_hides_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert printable(expected) == expected


def test_a_text_keeps_its_lines() -> None:
    assert printable_lines("def f():\n\treturn 1\r\n\x1b[2J") == "def f():\n        return 1\\r\n\\x1b[2J"


def test_a_users_mistake_is_one_printable_line() -> None:
    error = InputError("run \x1b[31mred\x07 is broken:\n  line 1\rforged: all is well")
    assert error.one_line == r"run \x1b[31mred\x07 is broken:   line 1 forged: all is well"


def test_a_name_with_a_line_end_does_not_hide_what_a_data_worker_says() -> None:
    where = "Caught InputError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  ..."
    error = InputError(f"{where}\nmemsave_recipes.core.errors.InputError: the image a\nb.png is broken: remove it")
    assert error.one_line == "the image a b.png is broken: remove it"


def test_json_is_read_with_printable_texts() -> None:
    text = json.dumps({"a\x1b": ["b\n", 1, 2.5, None, True, {"\ud800": []}]})
    assert sanitized(read_json(text)) == {"a\\x1b": ["b\\n", 1, 2.5, None, True, {"\\ud800": []}]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested deeper than 50 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 50 levels"),
        ("1" * 400, "a whole number of 400 digits"),
        ("{", "line 1 column 2"),
    ],
)
def test_json_that_nothing_can_hold_is_a_value_error(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_json(text)


def test_json_of_many_levels_is_a_value_error() -> None:
    sanitized(read_json("[" * 50 + "]" * 50))
    with pytest.raises(ValueError, match="nested deeper than 50 levels"):
        sanitized(read_json("[" * 51 + "]" * 51))
