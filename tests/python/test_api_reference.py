"""docs/api.md: that it is what the docstrings say, and what scripts/api_reference.py makes of sources."""

from __future__ import annotations

import pytest

import delta_matching
from conftest import ROOT, script_module


@pytest.fixture(scope="module")
def script():
    with script_module("api_reference") as module:
        yield module


def test_the_page_is_current(script):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == script.page(ROOT / "python"), "run scripts/api_reference.py"


def test_every_public_name_is_there(script):
    """Against what importing gives, which the page is not made from."""
    page = script.page(ROOT / "python")
    for name in delta_matching.__all__:
        assert f"\n### {name}\n" in page
        text = getattr(delta_matching, name).__doc__
        assert text and script.markdown(text).splitlines()[0] in page


SOURCES = {
    "__init__.py": '''
"""A package."""
from ._inner import shown
from .outer import Thing
if True:
    from .outer import Kind
__all__ = ["Kind", "Thing", "shown"]
''',
    "_inner.py": '''
@overload
def shown(a: int) -> int: ...
def shown(a: int, /, b: str = 'x', *, c: float | None = None, **unsupported: object) -> int:
    """Return ``a``; see :func:`other`.

    Args:
        a: a number
            that goes on.
        b, c: two at once.
        the rest: as ever.

    Returns: ``a``, at
        once.

    Raises:
        TypeError: no
        number. ValueError: too large.

    Example:
        >>> shown(1)

        1
    """
__all__ = ["shown"]  # a private module's
''',
    "outer.py": '''
from typing import Literal
Kind = Literal["one"]
class Thing:
    """A thing.

        code

    More.
    """
    def __init__(self, size: int) -> None: ...
    def grow(self) -> None:
        """Grow."""
    def _hidden(self) -> None:
        """Not there."""
    @property
    def size(self) -> int:
        """Rows."""
__all__ = ["Kind", "Thing"]
''',
}

EXPECTED = """
## delta_matching

A package.

### Kind

```python
Kind = Literal["one"]
```

### shown

```python
shown(a: int, /, b: str = "x", *, c: float | None = None) -> int
```

Return `a`; see `other`.

**Args**

- `a`: a number
  that goes on.
- `b`, `c`: two at once.
- the rest: as ever.

**Returns:** `a`, at
once.

**Raises**

- `TypeError`: no
  number.
- `ValueError`: too large.

**Example**

```python
>>> shown(1)

1
```

### Thing

```python
Thing(size: int)
```

A thing.

```python
code
```

More.

#### Thing.grow

```python
Thing.grow() -> None
```

Grow.

#### Thing.size

```python
Thing.size: int
```

Rows.

## delta_matching.outer
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "delta_matching").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / "delta_matching" / name).write_text(text)
    return tmp_path


def test_what_is_made_of_sources(script, folder):
    assert script.page(folder) == script.INTRODUCTION + EXPECTED


def test_a_name_that_nothing_defines(script, folder):
    (folder / "delta_matching" / "outer.py").write_text('__all__ = ["Kind"]')
    with pytest.raises(LookupError, match=r"delta_matching\.outer: __all__ lists Kind, which is not defined there"):
        script.page(folder)
