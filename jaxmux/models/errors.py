"""The error of a backbone that cannot be used."""

from jaxmux.errors import InputError


class BackboneError(InputError):
    """A checkpoint folder of a backbone (the frozen model), or its config.json, cannot be used. The
    message names the file or folder, and the key or tensor at fault."""
