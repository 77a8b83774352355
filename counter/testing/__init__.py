"""Test a store or a cache from outside: suites of cases for pytest that are written against the
ports, and a clock that a test moves. docs/adapters.md says how to use them.

Nothing else in the program imports this package, which needs the extra ``testing``.
"""

from pkgutil import iter_modules

import pytest

# Else a failed assertion would not show its values: pytest does this for test modules alone.
pytest.register_assert_rewrite(*(f"{__name__}.{each.name}" for each in iter_modules(__path__)))
