"""Functions that torch.compile() calls and does not trace."""

import functools
import sys
from typing import Any, Callable, TypeVar, cast

import torch

Called = TypeVar("Called", bound=Callable[..., Any])


def eager(function: Called) -> Called:
    """Returns a function that torch.compile() calls and does not trace, as PyTorch does for functions of its own."""
    disable: Any = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    disabled = disable(function)

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        # Without torch._dynamo nothing is compiled, and importing it would take seconds.
        return (disabled if "torch._dynamo" in sys.modules else function)(*arguments, **named)

    return cast(Called, called)
