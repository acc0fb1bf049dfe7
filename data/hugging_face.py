"""Loads Hugging Face data sets: from the hub, from its local cache, or from a folder."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DataError

if TYPE_CHECKING:
    import datasets

# The hub counts as unreachable if it does not answer one request within this time. Its own library
# tries for half a minute.
_SECONDS = 2.0
_GRACE = 0.5


def load_data_set(name: str, split: str, where: str) -> "datasets.Dataset | datasets.DatasetDict":
    """Loads one split of a data set on the hub, or a whole folder that `save_to_disk` wrote. If the
    hub cannot be reached, loads a data set of the hub from the local cache. `where` is the name of
    the source in error messages. Raises DataError if the package datasets is missing or the data
    set cannot be loaded, or if the hub cannot be reached and the data set is not in the local
    cache."""
    from huggingface_hub.constants import ENDPOINT

    # Importing `datasets` takes seconds; meanwhile, the hub is asked.
    hub_answers = (lambda: True) if Path(name).exists() else ask_hub(ENDPOINT)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{where}: Hugging Face data sets need the package datasets: pip install '.[datasets]' "
            "in the source folder of jaxmux"
        ) from error
    try:
        if is_saved_data_set(Path(name)):
            return datasets.load_from_disk(name)
        if hub_answers():
            return datasets.load_dataset(name, split=split)
    except Exception as error:  # datasets passes on any exception of its hub and file layers
        raise DataError(f"{where}: split {split!r} cannot be loaded: {error}") from error
    try:
        with _offline():
            return datasets.load_dataset(name, split=split)
    except Exception as error:
        cause = "" if isinstance(error, ConnectionError) else f" ({str(error).partition('\n')[0]})"
        raise DataError(
            f"{where}: the hub {ENDPOINT} (HF_ENDPOINT) cannot be reached, and "
            f"split {split!r} cannot be loaded from the local cache{cause}; download the data set "
            "where the hub can be reached, write it to a folder with save_to_disk, and use "
            '"hf:FOLDER"'
        ) from error


def is_saved_data_set(folder: Path) -> bool:
    return any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json"))


def ask_hub(endpoint: str) -> Callable[[], bool]:
    """Sends one request to a hub, for example "https://huggingface.co".

    Returns:
      A function that waits for the answer, until a few seconds after the request, and returns
      whether it came. The function also returns False if an environment variable such as
      HF_HUB_OFFLINE keeps the hub's library from sending requests.
    """
    # This client uses the same proxy and certificates as later requests.
    from huggingface_hub import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_SECONDS)
        except Exception:  # the exceptions of the client depend on the version of the library
            return
        answered.set()

    # The client's time limit does not include looking up the host's name, so a thread is used.
    asking, asked = threading.Thread(target=ask, daemon=True), time.monotonic()
    asking.start()

    def answers() -> bool:
        # An import in the main thread may have kept the asking thread from running, so the asking
        # thread gets at least `_GRACE` seconds from now.
        asking.join(max(_GRACE, asked + _SECONDS - time.monotonic()))
        return answered.is_set()

    return answers


@contextmanager
def _offline() -> Iterator[None]:
    """Within this context, keeps the hub's libraries from sending requests. They read the
    environment variable HF_HUB_OFFLINE only when they are imported, so their constants are
    changed."""
    import datasets
    import huggingface_hub

    modules = datasets.config, huggingface_hub.constants
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
