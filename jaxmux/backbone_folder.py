"""The folder of a backbone, which is the user's or ships with the package."""

import re
from pathlib import Path

from jaxmux.models import BackboneError
from jaxmux.package_files import resolve_path

_HUB_ID = re.compile(r"(?:hf:)?([\w.-]+/[\w.-]+)")


def resolve_backbone(backbone: str | Path) -> str:
    """Returns the path of a backbone's folder, from `resolve_path`.

    Args:
      backbone: a folder, or "jaxmux:" followed by a folder of the package.

    Raises:
      BackboneError: there is no such folder, and it is spelt like a model of the Hugging Face hub.
    """
    folder = resolve_path(backbone)
    if (hub := _HUB_ID.fullmatch(folder)) and not Path(folder).exists():
        raise BackboneError(
            f"backbone {str(backbone)!r}: there is no such folder, and models of the Hugging Face "
            f"hub are not downloaded; run `hf download {hub[1]} --local-dir FOLDER`, and use the "
            "folder"
        )
    return folder
