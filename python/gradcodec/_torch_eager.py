"""Functions that torch.compile() calls and does not trace."""

import functools
import sys
from typing import Any, Callable, TypeVar, cast

import torch

Called = TypeVar("Called", bound=Callable[..., Any])


def eager(function: Called) -> Called:
    """One that torch.compile() calls and does not trace, for it cannot: as PyTorch has it for its own."""
    disable: Any = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    disabled = disable(function)

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        # Otherwise nothing is compiled, and to import that would take seconds.
        return (disabled if "torch._dynamo" in sys.modules else function)(*arguments, **named)

    return cast(Called, called)
