import pytest

from memsave_recipes.core.text import GIB, MIB, format_bytes, to_gib


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (int(1.234 * GIB), "1.23 GiB"),
        (900 * MIB, "900 MiB"),
        (-2 * MIB, "-2 MiB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_gib():
    assert to_gib(3 * GIB) == 3.0
