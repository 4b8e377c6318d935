"""Tests of kernels with the headers of others, and of texts that are no C++. NVRTC compiles them, or g++ in its place,
and then they run. tests/frameworks/headers has NVIDIA's and CuPy's own headers."""

import textwrap

from test_compiled import GCC, REAL, run

def prepared(script):
    """Runs a script whose kernels a real NVRTC compiles."""
    assert REAL, "GRADCODEC_REAL_NVRTC is the path of a real NVRTC's library"
    run(
        f"""
    f = lambda *shape, dtype="f4": np.zeros(shape, dtype)
    def prepare(kernel, inputs, outputs):
        try:
            kernel.prepare(inputs, outputs, capability=90)
        except Refused as refusal:
            raise AssertionError(f"{{refusal}}\\n{{kernel.log()}}")
    def fails(words, kernel):
        refuses(26, words, kernel.prepare, [f(3)], [f(3)], capability=90)
    """
        + textwrap.indent(textwrap.dedent(script), "    "),
        nvrtc=REAL,
    )


def test_integers_have_their_names_without_a_header():
    prepared("""
        names = [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64, "ptr")]
        declared = " ".join(f"{name} {{0}}_{name} = 1;" for name in names)
        types = "".join(f'static_assert(sizeof(int{k}_t) * 8 == {k} && uint{k}_t(-1) > 0, "");' for k in (8, 16, 32, 64))
        prepare(elementwise("T x, raw int64 y", "T z", declared.format("o") + types + "const int64_t *p = &y[0]; z = g(p)", "k",
            preamble="__device__ int64_t g(const int64_t *x) {" + declared.format("p") + "return *x; }",
            loop_prep=declared.format("l")), [f(3), f(3, dtype="i8")], [f(3)])
        """)


def test_texts_that_do_not_compile_are_named_with_their_line():
    prepared("""
        k = lambda operation, **more: elementwise("T x", "T z", operation, "k", **more)
        fails("preamble(2): catastrophic error", k("", preamble="\\n#include <nowhere.h>"))
        fails("preamble(1): error", k("", preamble="namespace _gc { struct Indexer {}; }"))
        fails("preamble(1): error", k("", preamble="typedef float _gc;"))
        fails("k: operation(2): error: a } that closes nothing", k("z = x;\\n}"))
        fails("operation(2): error", k("\\nif (x > 0) {"))
        fails("preamble(3): error", k("z = x", preamble="\\n\\nstruct s { int x;"))
        fails("operation(1): error", k("z = " + "(" * 200 + "x"))
        """)


def test_a_parameter_called_n_an_empty_operation_and_a_size_beside_an_output():
    run("""
    for inputs, operation, loop_prep, n in [
        ("T x, T n", "z = x * n", "", integers(9)),
        ("T x, raw T n", "z = x * n[i] * k", "const T k = n[1] / n[1]", integers(9, low=1)),
        ("T x, float32 n", "z = x * k", "const float k = n", scalar(3, "f4")),
    ]:
        x, z = integers(9), np.zeros(9, "f4")
        elementwise(inputs, "T z", operation, "k", loop_prep=loop_prep)([x, n], [z])
        same(z, x * (n if isinstance(n, np.ndarray) else np.float32(3)))
    z = np.zeros(9, "f4")
    elementwise("T x", "T n", "n = x", "k")([x], [z])
    same(z, x)
    sums = reduction("T x, T n", "T y", "x * n", "a + b", "y = a", "0", "k")
    x, n, y = integers(4, 5), integers(4, 5), np.zeros(4, "f4")
    sums([x, n], [y], axes=1)
    same(y, (x * n).sum(axis=1))
    z, before = normal(4, 5), DRIVER.fake_launches()
    kept = z.copy()
    elementwise("T x", "T z", "", "k")([x], [z])
    same(z, kept)
    sized = elementwise("raw T n, T c", "T z", "z = n[_ind.size() - 1 - i] + c", "k")
    x, z = normal(6), np.zeros(6, "f4")
    sized([x, scalar(1, "f4")], [z], size=6)
    same(z, x[::-1] + np.float32(1))
    refuses(4, "size 5; the outputs have 6", sized, [x, scalar(1, "f4")], [z], size=5)
    refuses(4, "size -6", sized, [x, scalar(1, "f4")], [z], size=-6)
    refuses(1, "size 6; it is for kernels all of whose inputs are raw", sized, [x, x], [z], size=6)
    refuses(1, "outputs: \\"n\\" is the name of two parameters", elementwise, "T n", "T n", "", "k")
    """, nvrtc=GCC)
