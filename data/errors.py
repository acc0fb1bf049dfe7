"""The exception class of `jaxmux.data`."""


class DataError(ValueError):
    """Input data is bad; the message names the file and the line, and says what was expected."""
