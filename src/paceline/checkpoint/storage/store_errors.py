"""Errors of remote file systems: which may pass, and all of them as OSError, whatever implementations raise."""

from __future__ import annotations

import errno

__all__ = ["as_os_error", "is_permanent"]

_PERMANENT = (
    PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError,
    TypeError, ValueError, LookupError, AttributeError, ImportError, RuntimeError,  # NotImplementedError, too
)  # fmt: skip
_PERMANENT_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM, errno.EACCES, errno.ENOSYS}
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError",
    "DefaultCredentialsError", "PermissionDenied", "HostKeyNotVerifiable",
}  # fmt: skip
"""Errors of botocore, google-auth and asyncssh, none of which needs to be installed."""


def is_permanent(error: Exception) -> bool:
    """Return whether waiting can't help."""
    return (
        isinstance(error, _PERMANENT)
        or type(error).__name__ in _NO_CREDENTIALS
        or (isinstance(error, OSError) and error.errno in _PERMANENT_CODES)
    )


def as_os_error(error: Exception, where: str) -> OSError:
    """Return an error of the same kind that names the file or folder."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = f"no answer in time ({reason})"
    if type(error).__name__ in _NO_CREDENTIALS:
        return PermissionError(errno.EACCES, f"{where}: {reason}")
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        code = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}.get(type(error), errno.EACCES)
        return type(error)(code, f"{where}: {reason}")
    code = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else errno.EIO
    return OSError(code, f"{where}: {reason}")
