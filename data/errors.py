"""The exception class of `jaxmux.data`."""


class DataError(ValueError):
    """The input data cannot be used. The message names the file and the line, and says what was
    expected."""
