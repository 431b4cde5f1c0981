"""A lock on a file, so that only one run writes to a place at a time."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None

# Files that this process has locked. `fcntl.lockf` excludes other processes only. In
# return, its lock ends with this process, even if forked ones, such as the workers of a
# loader, live on.
_LOCKED: set[Path] = set()
_TAKEN = -1


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Create and lock a file and, in the end, delete it; yield whether no other run has
    locked it.

    The system releases the lock when the process ends, even if it is killed. If the
    folder or its file system admits no lock, there is none.
    """
    path = path.parent.resolve() / path.name
    lock = _TAKEN if path in _LOCKED else _lock(path)
    if lock is _TAKEN:
        yield False
        return
    _LOCKED.add(path)
    try:
        yield True
    finally:
        _LOCKED.discard(path)
        if lock is not None:
            with suppress(OSError):
                path.unlink()
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a file; return its descriptor, `_TAKEN`, or `None` if there are no locks."""
    if fcntl is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have deleted the file meanwhile.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.stat()):
                        return lock
            except OSError as error:
                os.close(lock)
                taken = error.errno in (errno.EACCES, errno.EAGAIN)
                return _TAKEN if taken else None
            os.close(lock)
    except OSError:  # The folder cannot be written to.
        return None
