"""The exception class of `jaxmux.data`."""

from jaxmux.errors import InputError


class DataError(InputError):
    """Training data, a prompt or a tokenizer cannot be used. The message describes the problem and,
    if a record is at fault, names its file and line."""
