"""The one line that ends a run."""

import pytest

from memsave_recipes.core.errors import InputError


def line_of(call, *args, **options):
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
