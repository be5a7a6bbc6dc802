"""A warning is an error, in every test there is."""

import warnings

import pytest


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning, FutureWarning, ResourceWarning])
def test_a_warning_fails_the_test_that_causes_it(kind: type[Warning]) -> None:
    """Nothing is only warned about: without this rule the call below would go through."""
    with pytest.raises(kind, match="a word of warning"):
        warnings.warn("a word of warning", kind, stacklevel=1)
