"""Tests of more elements, and more bytes between them, than 32 bits can count. All data stays on the device.

The elements are a hash of their index, so that no wrapped index finds the same values. PyTorch computes the expected
results from the hash, piece by piece.
"""

import pytest

import capi
import gpu
import layouts
import kernels
from capi import BIG, LITTLE, check, lib

pytestmark = pytest.mark.gpu

LARGE = 2**32 + 8 * 1237 + 5
PIECE = 2**27  # elements computed at a time

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def room():
    """Skips if the GPU is too small; frees all memory at the end."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    yield
    torch.cuda.empty_cache()


def bits_from(first, count):
    """Returns uint8, 0 or 1, of the elements from `first` on."""
    index = torch.arange(first, first + count, device="cuda")
    return ((index * 0x9E3779B1 ^ index >> 7) >> 19 & 1).to(torch.uint8)


def bytes_from(first, count, total, order=BIG):
    """Returns the packed bytes from byte `first` on; the bits after `total` elements are zero."""
    bits = torch.zeros(8 * count, dtype=torch.uint8, device="cuda")
    there = max(0, min(8 * count, total - 8 * first))
    bits[:there] = bits_from(8 * first, there)
    weights = [1 << (j if order == LITTLE else 7 - j) for j in range(8)]
    return (bits.view(-1, 8) * torch.tensor(weights, dtype=torch.uint8, device="cuda")).sum(1, dtype=torch.uint8)


def pieces(total, size=PIECE):
    return ((first, min(size, total - first)) for first in range(0, total, size))


def at(tensor, dtype, shape=None):
    shape = tuple(tensor.shape) if shape is None else shape
    return gpu.at(tensor.data_ptr(), shape, dtype, strides=tensor.stride() if shape == tuple(tensor.shape) else None)


def fill_with_bits(flat):
    for first, count in pieces(flat.numel()):
        flat[first : first + count] = bits_from(first, count).to(flat.dtype)


def assert_packed(packed, total, order=BIG):
    """Checks that flat bytes are those of `total` elements, and zeros after them."""
    for first, count in pieces(packed.numel(), PIECE // 8):
        expected = bytes_from(first, count, total, order)
        assert torch.equal(packed[first : first + count], expected), f"packed bytes from {first} on"


def assert_bits(flat):
    for first, count in pieces(flat.numel()):
        expected = bits_from(first, count).to(flat.dtype)
        assert torch.equal(flat[first : first + count], expected), f"elements from {first} on"


def packed_bits(total):
    packed = torch.empty(-(-total // 8), dtype=torch.uint8, device="cuda")
    for first, count in pieces(packed.numel(), PIECE // 8):
        packed[first : first + count] = bytes_from(first, count, total)
    return packed


def poisoned(shape, dtype=torch.uint8):
    return torch.full(shape, layouts.PATTERN, dtype=torch.uint8, device="cuda").view(dtype)


def stream():
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("n_chunks", [1, 3])
def test_more_than_two_to_the_32_bools_are_packed(n_chunks):
    truth = poisoned((LARGE,), torch.bool)
    fill_with_bits(truth)
    packed = poisoned((n_chunks, capi.chunk_bytes(LARGE, n_chunks)))
    check(lib.gc_pack_chunks_into(at(truth, "bool").view, BIG, at(packed, "uint8").view, stream()))
    assert_packed(packed.view(-1), LARGE)


def test_more_than_two_to_the_32_elements_are_unpacked_to_bytes():
    packed = packed_bits(LARGE)
    bits = poisoned((LARGE + 64,))
    dst = at(bits, "uint8", (LARGE,))
    check(lib.gc_unpack_chunks_into(at(packed, "uint8", (1, packed.numel())).view, BIG, dst.view, stream()))
    assert_bits(bits[:LARGE])
    assert bool((bits[LARGE:] == layouts.PATTERN).all())


def test_more_than_two_to_the_32_signs_are_packed():
    values = torch.empty(LARGE, dtype=torch.bfloat16, device="cuda")
    fill_with_bits(values)
    values.sub_(0.5)  # -0.5 where the bit is 0
    packed = poisoned((1, -(-LARGE // 8)))
    check(lib.gc_pack_signs_into(at(values, "bfloat16").view, LITTLE, at(packed, "uint8").view, stream()))
    assert_packed(packed.view(-1), LARGE, LITTLE)


def test_every_other_of_more_than_two_to_the_33_bytes_is_packed():
    memory = poisoned((2 * LARGE,))
    truth = memory[::2]
    fill_with_bits(truth)
    packed = poisoned((1, -(-LARGE // 8)))
    check(lib.gc_pack_chunks_into(at(truth, "uint8").view, BIG, at(packed, "uint8").view, stream()))
    assert_packed(packed.view(-1), LARGE)


def test_every_other_of_more_than_two_to_the_33_bytes_is_written():
    packed = packed_bits(LARGE)
    memory = poisoned((2 * LARGE,))
    src = at(packed, "uint8", (1, packed.numel()))
    check(lib.gc_unpack_chunks_into(src.view, BIG, at(memory[::2], "uint8").view, stream()))
    assert_bits(memory[::2])
    for first, count in pieces(LARGE):
        assert bool((memory[1::2][first : first + count] == layouts.PATTERN).all()), "bytes between the elements"


ROWS, COLUMNS = 2**16 + 8, 2**16 + 3  # more than 2^32 elements


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_of_more_than_two_to_the_32_elements_is_packed_and_unpacked_along_an_axis(axis):
    truth = torch.empty(ROWS * COLUMNS, dtype=torch.uint8, device="cuda")
    fill_with_bits(truth)
    truth = truth.view(ROWS, COLUMNS)
    shape = (ROWS // 8, COLUMNS) if axis == 0 else (ROWS, -(-COLUMNS // 8))
    packed = poisoned(shape)
    check(lib.gc_pack_bits_into(at(truth, "uint8").view, axis, BIG, at(packed, "uint8").view, stream()))
    for first in range(0, ROWS, 2**11):
        rows = truth[first : first + 2**11]
        if axis == 0:
            weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device="cuda")
            expected = (rows.view(-1, 8, COLUMNS) * weights[:, None]).sum(1, dtype=torch.uint8)
            assert torch.equal(packed[first // 8 : first // 8 + expected.shape[0]], expected), f"rows from {first} on"
        else:
            whole = torch.zeros(rows.shape[0], 8 * shape[1], dtype=torch.uint8, device="cuda")
            whole[:, :COLUMNS] = rows
            weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device="cuda")
            expected = (whole.view(-1, shape[1], 8) * weights).sum(2, dtype=torch.uint8)
            assert torch.equal(packed[first : first + rows.shape[0]], expected), f"rows from {first} on"
    bits = poisoned((ROWS, COLUMNS))
    check(lib.gc_unpack_bits_into(at(packed, "uint8").view, axis, BIG, at(bits, "uint8").view, stream()))
    assert torch.equal(bits, truth)


def test_a_transposed_matrix_of_more_than_two_to_the_32_elements_is_packed():
    truth = torch.empty(ROWS * COLUMNS, dtype=torch.uint8, device="cuda")
    fill_with_bits(truth)
    turned = truth.view(COLUMNS, ROWS).T  # element i, j is that at j * ROWS + i
    packed = poisoned((1, ROWS * COLUMNS // 8))
    check(lib.gc_pack_chunks_into(at(turned, "uint8").view, BIG, at(packed, "uint8").view, stream()))
    copied = turned.contiguous().view(-1)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device="cuda")
    for first, count in pieces(packed.numel(), PIECE // 8):
        elements = copied[8 * first : 8 * (first + count)].view(-1, 8)
        assert torch.equal(packed[0, first : first + count], (elements * weights).sum(1, dtype=torch.uint8))


def test_few_elements_may_lie_more_than_two_to_the_32_bytes_apart():
    memory = poisoned((3 * 2**32 + 100,))
    bits = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 1, 0, 1]], dtype=torch.uint8, device="cuda")
    apart = torch.as_strided(memory, (3, 5), (2**32 + 3, 7))
    apart.copy_(bits)
    packed = poisoned((1, 2))
    check(lib.gc_pack_chunks_into(at(apart, "uint8").view, BIG, at(packed, "uint8").view, stream()))
    assert packed.tolist() == [[0b10110010, 0b01111010]]
    apart.fill_(layouts.PATTERN)
    check(lib.gc_unpack_chunks_into(at(packed, "uint8").view, BIG, at(apart, "uint8").view, stream()))
    assert torch.equal(apart, bits)
    apart.fill_(layouts.PATTERN)
    assert bool((memory[: 2**31] == layouts.PATTERN).all()) and bool((memory[-(2**31) :] == layouts.PATTERN).all())


# --- kernels that are compiled at run time ----------------------------------------------------------------------------


def run_compiled(kernel, inputs, outputs, **options):
    bytes_ = kernel.workspace_bytes(inputs, outputs, **options)
    workspace = torch.empty(max(1, bytes_), dtype=torch.uint8, device="cuda")
    given = kernel.options(**options, workspace=at(workspace, "uint8") if bytes_ else None)
    check(lib.gc_kernel_run(*kernel.arguments(inputs, outputs, given), stream()))
    torch.cuda.synchronize()


@pytest.mark.parametrize("start", [0, 1, 16])
def test_a_kernel_processes_more_than_two_to_the_32_elements(start):
    """Runs in vectors, from an odd address, with element numbers beyond 32 bits, and a part of a vector at the end."""
    total = 2**32 + 3
    x, z = poisoned((start + total,)), poisoned((start + total + 64,))
    fill_with_bits(x[start:])
    kernel = kernels.elementwise("uint8 x", "uint8 z", "z = x + 2 * (i >> 31 & 15) + 32 * (i & 7)", "numbered")
    run_compiled(kernel, [at(x[start:], "uint8")], [at(z[start : start + total], "uint8")])
    for first, count in pieces(total):
        i = torch.arange(first, first + count, device="cuda")
        expected = (bits_from(first, count) + 2 * (i >> 31 & 15) + 32 * (i & 7)).to(torch.uint8)
        assert torch.equal(z[start + first : start + first + count], expected), f"elements from {first} on"
    assert bool((z[:start] == layouts.PATTERN).all()) and bool((z[start + total :] == layouts.PATTERN).all())


@pytest.mark.parametrize("turned", [False, True])
def test_a_kernel_broadcasts_to_more_than_two_to_the_32_elements(turned):
    """Runs two loops of more rounds than 32 bits count; turned: a transposed input, so element by element."""
    x = torch.empty(ROWS * COLUMNS, dtype=torch.uint8, device="cuda")
    fill_with_bits(x)
    x = x.view(COLUMNS, ROWS).T if turned else x.view(ROWS, COLUMNS)
    row, column = torch.arange(COLUMNS, device="cuda") * 7, torch.arange(ROWS, device="cuda") * 13
    row, column = row.to(torch.uint8), column.to(torch.uint8).view(ROWS, 1)
    z = poisoned((ROWS, COLUMNS))
    add = kernels.elementwise("uint8 x, uint8 y, uint8 w", "uint8 z", "z = x + y + w", "sum_of_three")
    run_compiled(add, [at(x, "uint8"), at(row, "uint8"), at(column, "uint8")], [at(z, "uint8")])
    for first in range(0, ROWS, 2**11):
        rows = slice(first, first + 2**11)
        assert torch.equal(z[rows], x[rows] + row + column[rows]), f"rows from {first} on"


@pytest.mark.parametrize("columns", [1, 3])
def test_a_kernel_reduces_two_to_the_33_elements_that_are_one(columns):
    """Reduces broadcast elements, which take no memory. Their numbers' upper bits have all values equally often."""
    many = 2**33
    ones = torch.arange(1, columns + 1, dtype=torch.uint8, device="cuda").view(1, columns).expand(many, columns)
    x = gpu.at(ones.data_ptr(), (many, columns), "uint8", strides=(0, 1))
    sums = kernels.reduction("T x", "int64 z, int64 w", "pair(x, _J >> 31)", "pair(a.x + b.x, a.at + b.at)",
        "z = a.x; w = a.at", name="many_sums", reduce_type="pair", preamble="""
        struct pair {
            long long x, at;
            __device__ pair() {}
            __device__ pair(long long x, long long at) : x(x), at(at) {}
        };""")  # fmt: skip
    totals = torch.zeros(2, columns, dtype=torch.int64, device="cuda")
    run_compiled(sums, [x], [at(totals[0], "int64"), at(totals[1], "int64")], axes=0)
    assert totals[0].tolist() == [many * (k + 1) for k in range(columns)]
    assert totals[1].tolist() == [2**31 * (0 + 1 + 2 + 3)] * columns


def test_a_kernel_reduces_more_than_two_to_the_32_elements_over_any_axes():
    """Does not use `_J`, so the loops are in the order of memory."""
    x = torch.empty(ROWS * COLUMNS, dtype=torch.uint8, device="cuda")
    fill_with_bits(x)
    x = x.view(ROWS, COLUMNS)
    sums = kernels.reduction("T x", "int64 z", "x", "a + b", "z = a", "0", "large_sums", reduce_type="long long")
    of_rows = torch.cat([x[first : first + 2**11].sum(1, dtype=torch.int64) for first in range(0, ROWS, 2**11)])
    of_columns = sum(x[first : first + 2**11].sum(0, dtype=torch.int64) for first in range(0, ROWS, 2**11))
    for axes, expected in (1, of_rows), (0, of_columns), (None, of_rows.sum()):
        for view, how in (x, axes), (x.T, None if axes is None else 1 - axes):
            z = torch.zeros_like(expected)
            run_compiled(sums, [at(view, "uint8")], [at(z, "int64")], axes=how)
            assert torch.equal(z, expected), (axes, how)
