"""The exception class of `jaxmux.data`."""

from jaxmux.errors import InputError


class DataError(InputError):
    """The input data cannot be used. The message names the file and the line, and says what was
    expected."""
