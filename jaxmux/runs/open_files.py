"""How many files the process of a server may open."""

import logging
import resource

_log = logging.getLogger("jaxmux")

# More open files than a server needs. Some systems permit no more, although they name no limit.
_MOST = 2**16


def permit_open_files() -> None:
    """Raises the soft limit of open files to the hard one, up to 65,536, because each task with a
    million tokens has a file open (`TokenFile`). A limit that cannot be raised is logged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as e:
        _log.warning("the limit of open files stays at %d: %s", soft, e)
