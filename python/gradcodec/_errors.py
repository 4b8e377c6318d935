"""The exception for calls that the library refuses or fails."""


class GradCodecError(RuntimeError):
    """A call that failed, in the library's words; `status` is one of GC_STATUS_*: INVALID_ARGUMENT where C returns -1, as
    for a number of bytes, whatever the reason."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status
