"""A plugin of pytest: CuPy's ElementwiseKernel and ReductionKernel are ours while it is there, so that CuPy's own tests
of them, and what is built of them in cupyx, run on our kernels. What we do not offer (complex numbers, textures,
`no_return`) goes to CuPy's; the last lines tell how many of both ran.

    pip install cupy-cuda13x==14.2.0
    git clone --depth 1 --branch v14.2.0 https://github.com/cupy/cupy build/cupy
    cp build/cupy/tests/cupy_tests/core_tests/test_{userkernel,reduction,carray}.py build/tests/
    GRADCODEC_LIBRARY=target/release/libgradcodec.so.0 PYTHONPATH=python:tests/frameworks/python \\
        python -m pytest -p cupy_on_gradcodec -p no:cacheprovider build/tests/test_{userkernel,reduction,carray}.py
"""

import functools
import pathlib
import re

import cupy
import numpy
from gradcodec import GradCodec

THEIRS = cupy.ElementwiseKernel, cupy.ReductionKernel
HEADERS = "".join(f"#include <cupy/{name}>\n" for name in ("complex.cuh", "carray.cuh", "atomics.cuh", "math_constants.h"))
NUMBERS = bool, int, float, numpy.generic
FMAD = 1  # as CuPy
runs = {"ours": 0, "CuPy's": 0}


@functools.cache
def library():
    return GradCodec()


@functools.cache
def folders():
    """Options for what CuPy lets its kernels include."""
    from cuda.pathfinder import find_nvidia_header_directory

    own = pathlib.Path(cupy.__file__).parent / "_core" / "include"
    cccl = [own / "cupy" / "_cccl" / name for name in ("cub", "thrust", "libcudacxx")]
    return ["--std=c++17", *(f"-I{folder}" for folder in (*cccl, own, find_nvidia_header_directory("cudart")))]


def parsed(text):
    """(type, name, whether it is raw) of each parameter."""
    words = [part.split() for part in text.split(",") if part.strip()]
    return [(of[-2], of[-1], of[0] == "raw") for of in words]


class Kernel:
    def __init__(self, theirs, make, inputs, outputs, texts, name, preamble, options, left=False):
        if not name.isidentifier():
            raise ValueError(f"Invalid kernel name: {name!r}")
        self.theirs, self.name, self._cached_codes = theirs, name, {}
        self.in_params, self.out_params = parsed(inputs), parsed(outputs)
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.nargs = self.nin + self.nout
        self.left = left or any(of.startswith("complex") for of, _, _ in self.in_params + self.out_params)
        more = {"preamble": HEADERS + preamble, "options": [*folders(), *options], "flags": FMAD}
        self.kernel = None if self.left else make(inputs, outputs, *texts, name=name, **more)

    def is_ours(self, arguments):
        if self.left:
            return False
        kinds = [numpy.asarray(x).dtype.kind if isinstance(x, NUMBERS) else getattr(getattr(x, "dtype", None), "kind", "V")
                 for x in arguments]  # fmt: skip
        return not {"c", "V", "O"} & set(kinds)

    def outputs(self, inputs, given, shape):
        """Those that are given, or new ones, of the types that the inputs say."""
        letters = {}
        for arrays in True, False:
            for (of, _, _), x in zip(self.in_params, inputs):
                if len(of) == 1 and isinstance(x, cupy.ndarray) == arrays:
                    letters.setdefault(of, x.dtype if arrays else numpy.asarray(x).dtype)
        self._cached_codes[tuple(numpy.asarray(x).dtype if isinstance(x, NUMBERS) else x.dtype for x in inputs)] = self
        return list(given) or [cupy.empty(shape, letters[of] if of in letters else of) for of, _, _ in self.out_params]

    def split(self, arguments):
        if len(arguments) not in (self.nin, self.nargs):
            raise TypeError(f"Wrong number of arguments for {self.name!r}")
        numbers = [numpy.asarray(x) if isinstance(x, NUMBERS) else x for x in arguments]
        return numbers[: self.nin], numbers[self.nin :]

    def shape(self, inputs):
        """Of what is not raw; None if there is none."""
        shapes = [x.shape for (_, _, raw), x in zip(self.in_params, inputs) if isinstance(x, cupy.ndarray) and not raw]
        return numpy.broadcast_shapes(*shapes) if shapes else None


class ElementwiseKernel(Kernel):
    """cupyx asks for the shape of an output `y` as `_raw_y.shape()`, which is no part of what CuPy offers others. Here it is
    that of one more raw input."""

    def __init__(self, in_params, out_params, operation, name="kernel", reduce_dims=True, preamble="", no_return=False,
                 return_tuple=False, options=(), loop_prep="", after_loop="", **more):  # fmt: skip
        theirs = functools.partial(THEIRS[0], in_params, out_params, operation, name, reduce_dims, preamble, no_return,
                                   return_tuple, options=options, loop_prep=loop_prep, after_loop=after_loop, **more)  # fmt: skip
        names = [name for _, name, _ in parsed(out_params)]
        self.shown = [number for number, name in enumerate(names) if f"_raw_{name}.shape()" in operation]
        operation = re.sub(r"\b_raw_(\w+)\.shape\(\)", r"shape_of_\1.shape()", operation)

        def make(inputs, outputs, *texts, **how):
            inputs = ", ".join([inputs] * bool(inputs.strip()) + [f"raw bool shape_of_{names[k]}" for k in self.shown])
            return library().elementwise(inputs, outputs, *texts, loop_prep=loop_prep, after_loop=after_loop, **how)

        super().__init__(theirs, make, in_params, out_params, [operation], name, preamble, options, no_return or bool(more))
        self.return_tuple = return_tuple

    def __call__(self, *arguments, size=None, block_size=None, stream=None):
        if stream is not None or not self.is_ours(arguments):
            runs["CuPy's"] += 1
            return self.theirs()(*arguments, **{k: v for k, v in dict(size=size, stream=stream).items() if v is not None})
        if block_size is not None and block_size <= 0:
            raise ValueError(f"block_size: {block_size}")
        inputs, given = self.split(arguments)
        of_outputs = [x.shape for (_, _, raw), x in zip(self.out_params, given) if not raw]
        shape = self.shape(inputs)
        if shape is None and of_outputs:
            shape = of_outputs[0]
        if shape is not None and size is not None:
            raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
        if shape is None and size is None:
            raise ValueError("Loop size is undecided.")
        outputs = self.outputs(inputs, given, (size,) if shape is None else shape)
        if size != 0:
            shapes = [cupy.broadcast_to(cupy.zeros((), bool), outputs[k].shape) for k in self.shown]
            self.kernel([*inputs, *shapes], outputs, **({} if size is None else {"size": size}))
        runs["ours"] += 1
        return tuple(outputs) if self.return_tuple or len(outputs) > 1 else outputs[0]


class ReductionKernel(Kernel):
    def __init__(self, in_params, out_params, map_expr, reduce_expr, post_map_expr, identity, name="reduce_kernel",
                 reduce_type=None, reduce_dims=True, preamble="", options=()):  # fmt: skip
        theirs = functools.partial(THEIRS[1], in_params, out_params, map_expr, reduce_expr, post_map_expr, identity, name,
                                   reduce_type, reduce_dims, preamble, options)  # fmt: skip
        texts = [map_expr, reduce_expr, post_map_expr, None if identity in (None, "") else str(identity)]
        make = functools.partial(library().reduction, reduce_type=reduce_type)
        super().__init__(theirs, make, in_params, out_params, texts, name, preamble, options)

    def __call__(self, *arguments, out=None, axis=None, keepdims=False, stream=None):
        if stream is not None or not self.is_ours(arguments):
            runs["CuPy's"] += 1
            return self.theirs()(*arguments, out=out, axis=axis, keepdims=keepdims, stream=stream)
        inputs, given = self.split(arguments)
        shape = self.shape(inputs)
        axes = range(len(shape)) if axis is None else axis
        axes = numpy.lib.array_utils.normalize_axis_tuple(axes, len(shape))
        kept = [1 if k in axes else size for k, size in enumerate(shape) if keepdims or k not in axes]
        outputs = self.outputs(inputs, given if out is None else [out], tuple(kept))
        how = {"axes": axes, "keepdims": keepdims}
        needed = self.kernel.workspace_bytes(inputs, outputs, **how)
        self.kernel(inputs, outputs, **how, workspace=cupy.empty(needed, "uint8") if needed else None)
        runs["ours"] += 1
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def put(elementwise=ElementwiseKernel, reduction=ReductionKernel):
    for module in cupy, cupy._core:
        module.ElementwiseKernel, module.ReductionKernel = elementwise, reduction


def pytest_configure():
    put()


def pytest_unconfigure():
    put(*THEIRS)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(", ".join(f"{count} runs of kernels of {whose}" for whose, count in runs.items()))
