"""Text that a model's code made, as text that can be sent.

A model's exceptions and names may hold what UTF-8 cannot (file names decoded by surrogates), or fail when
they are asked what they say. Neither may cost the process that reports them.
"""

from __future__ import annotations


def plain_text(value: object) -> str:
    """The value's text, with what is no Unicode replaced. Never raises."""
    try:
        text = str(value)
    except BaseException:
        # Whatever it raised, SystemExit included, is the fault of the value and not a wish of its own.
        text = f"a {type(value).__name__} that cannot be shown"
    return text.encode("utf-8", "replace").decode("utf-8")
