"""The one exception class of `jaxmux.data`."""


class DataError(ValueError):
    """Bad input data; the message names the file and line at fault, what was found and expected."""
