"""The exception for calls that the library refuses or fails."""

from enum import IntEnum

MOST_CHARACTERS = 500  # of a message


class Status(IntEnum):
    """Reason of a failed call: GC_STATUS_* of gradcodec.h."""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED_DTYPE = 2
    UNSUPPORTED_DEVICE = 3
    SHAPE_MISMATCH = 4
    READ_ONLY = 5
    NOT_CONTIGUOUS = 6
    SIZE_OVERFLOW = 7
    BUSY = 8
    CORRUPT = 9
    OUT_OF_MEMORY = 10
    DRIVER_UNAVAILABLE = 20
    CUDA = 21
    CONTEXT_LOST = 22
    NVRTC_UNAVAILABLE = 25
    COMPILE = 26
    COMM_UNAVAILABLE = 30
    COMM = 31
    SHARE = 40
    TIMEOUT = 41
    PANIC = 99


class GradCodecError(RuntimeError):
    """A call that failed: `str()` is the library's message and the status's name.

    `status` is a Status, or a number that this package does not define. It is INVALID_ARGUMENT for functions where C
    returns -1 for every failure, such as a number of bytes.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        try:
            self.status: int = Status(status)
        except ValueError:
            self.status = status

    def __str__(self) -> str:
        name = f" ({self.status.name})" if isinstance(self.status, Status) and self.status else ""
        return _cut(str(self.args[0]) if self.args else "", MOST_CHARACTERS - len(name)) + name


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
