"""bench/multi_gpu.py, rehearsed without a GPU; and the chain that it compares with, held to DeepSpeed's formula."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from peers import ROOT

torch = pytest.importorskip("torch")
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "python")]

import deepspeed_worker  # noqa: E402 the path comes first
import report  # noqa: E402
from comms import reference  # noqa: E402

RANKS = 2
ALL = {"handle float32", "handle bfloat16", "nccl float32", "nccl bfloat16", "plain float32", "deepspeed"}


BLOCKS = ["bf16", "mxfp8", "int8", "int4", "mxfp4"]
EVERY = [*BLOCKS, "int8 errors", "int4 errors", "onebit", "int8 over NCCL"]


def rehearse(output, *more, program=ROOT / "bench/multi_gpu.py"):
    command = [sys.executable, str(program), "--device", "cpu", "--ranks", str(RANKS)]
    command += ["--library", os.environ["GRADCODEC_LIBRARY"], "--output", str(output), *more]
    temporary = output.parent / "temporary"
    temporary.mkdir()
    # DistributedDataParallel makes an empty folder for a compiler, and leaves it.
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(output.parent / "compiled")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not list(temporary.iterdir()), "files stayed"
    return done


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    output = tmp_path_factory.mktemp("rehearsed") / "multi_gpu.json"
    output.write_text("of an earlier run")
    return output, rehearse(output)


def test_a_rehearsal_measures_every_contender_on_every_rank(rehearsed, tmp_path):
    output, done = rehearsed
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A REHEARSAL" in done.stdout
    results = json.loads(output.read_text())
    assert results["about"]["rehearsal"] and len(results["sizes"]) == 2
    for row in results["sizes"]:
        assert set(row["samples"]) == ALL and not row["failures"]
        assert {len(samples) for of_ranks in row["samples"].values() for samples in of_ranks} == {3}
        assert all(len(of_ranks) == RANKS for of_ranks in row["samples"].values())
        assert set(row["stages"]) == {"float32", "bfloat16"}

    names = {*EVERY, "nccl"}
    assert len(results["codecs"]) == 2
    for row in results["codecs"]:
        of_dtypes = {f"{name} {dtype}" for name in names for dtype in ("float32", "bfloat16")}
        expected = {f"{of} {way}" for of in of_dtypes for way in ("C", "Python") if way == "C" or "nccl" not in of}
        assert set(row["samples"]) == set(row["host"]) == expected and not row["failures"]
        assert all(len(of_ranks) == RANKS for of_ranks in row["samples"].values())
    assert "| int8 errors |" in done.stdout and "| bfloat16 from Python, us |" in done.stdout

    page = tmp_path / "page.md"
    report = [sys.executable, str(ROOT / "bench/report.py"), str(output), "--page", str(page)]
    subprocess.run(report, check=True, capture_output=True)
    assert not page.exists()  # it is not for a rehearsal


def of_cards(rehearsed, tmp_path, without):
    """The rehearsal's samples, as if they were of GPUs; `without` a contender."""
    results = json.loads(rehearsed[0].read_text())
    results["about"]["rehearsal"] = False
    for row in results["sizes"]:
        del row["samples"][without]
    path = tmp_path / "multi_gpu.json"
    path.write_text(json.dumps(results))
    return results, path


@pytest.mark.parametrize("without", sorted(ALL))
def test_tables_have_a_dash_where_a_contender_is_missing(rehearsed, tmp_path, without):
    results, _ = of_cards(rehearsed, tmp_path, without)
    tables = report.multi_gpu_tables(results)
    assert "A REHEARSAL" not in tables
    # In each of the two tables a line a size.
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.splitlines()]
    of_sizes = [line[2:] for line in lines if line and line[0].startswith("all-reduce ") and line[1] in ("1K", "4,104")]
    assert len(of_sizes) == 4
    column = {"handle": 0, "nccl": 2, "plain": 4, "deepspeed": 5}[without.split()[0]]
    table = 1 if without.endswith("bfloat16") else 0
    for line in of_sizes[2 * table : 2 * table + 2]:
        eager = 4 if table else 6
        depends = {0: [eager, eager + 2], 2: [eager], 4: [], 5: [eager + 2]}[column]
        missing = {column, *(index for index in depends if index < len(line))} | {1, 3, eager + 1}  # no graphs
        assert {index for index, cell in enumerate(line) if cell == "-"} == missing


def test_the_page_gets_a_part_that_begins_with_its_picture(rehearsed, tmp_path):
    _, path = of_cards(rehearsed, tmp_path, "handle float32")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- several cards -->\nold\n<!-- /several cards -->\nafter\n")
    for _ in range(2):
        subprocess.run([sys.executable, str(ROOT / "bench/report.py"), str(path), "--page", str(page)], check=True)
        text = page.read_text()
        assert text.startswith("before\n<!-- several cards -->\n## Several GPUs\n\n![")
        before, codecs = text.split("\n<!-- all codecs -->\n")
        assert before.endswith("|\n<!-- /several cards -->\nafter\n") and text.count("(performance-multi-gpu.svg)") == 1
        assert codecs.startswith("## Several GPUs, every codec\n\n![") and codecs.endswith("|\n<!-- /all codecs -->\n")
        assert "old" not in text and text.count("## Several GPUs\n") == 1


@pytest.mark.parametrize(
    "world, dtype, elements, eager, graph, deepspeed, expected",
    [
        (2, "float32", report.LARGE, 2.2, 9, 1, "2.2 times NCCL: reached"),
        (2, "float32", report.LARGE, 2.1, 9, 1, "2.2 times NCCL: missed"),
        (4, "float32", report.LARGE, 3.3, 9, 14, "3.2 times NCCL: reached; 15 times DeepSpeed: missed"),
        (4, "bfloat16", report.LARGE, 2.7, 9, None, "2.7 times NCCL: reached"),
        (8, "float32", report.LARGE, 0.9, 9, 20, "1 times NCCL: missed"),
        (2, "float32", 2**22, 1.0, 0.1, 1, "1 times NCCL: reached"),
        (2, "float32", 2**22, None, 0.1, 1, ""),
        (2, "float32", 2**20, 0.1, 0.9, 1, "1 times NCCL in a graph: missed"),
        (2, "float32", 2**18, 0.1, 0.1, 1, ""),
    ],
)
def test_what_is_to_reach(world, dtype, elements, eager, graph, deepspeed, expected):
    about, row = {"world": world, "rehearsal": False}, {"elements": elements}
    assert report.all_reduce_to_reach(about, dtype, row, eager, graph, deepspeed) == expected
    assert report.all_reduce_to_reach({**about, "rehearsal": True}, dtype, row, eager, graph, deepspeed) == ""


def test_sizes_that_time_does_not_suffice_for_are_named_and_no_failure(tmp_path):
    done = rehearse(tmp_path / "multi_gpu.json", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not begun, for 0 s were over: 1K, 4,104." in done.stdout and "FAILED" not in done.stdout
    results = json.loads((tmp_path / "multi_gpu.json").read_text())
    assert results["sizes"] == [] and results["not begun"]["elements"] == [1024, 4104] and not results["failed"]


def broken(tmp_path, code):
    """A program that is bench/multi_gpu.py after `code`, in its ranks, too, which begin with the same file."""
    program = tmp_path / "broken.py"
    lines = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT / "bench")!r})
        import multi_gpu
        import multi_gpu_rank as rank
    """
    end = "if __name__ == '__main__':\n    multi_gpu.main()\n"
    program.write_text(textwrap.dedent(lines) + textwrap.dedent(code) + end)
    return program


def test_a_contender_that_raises_on_one_rank_is_named_and_the_others_are_measured(tmp_path):
    code = """
        class Raises(rank.NcclSum):
            def allocate(self):
                super().allocate()
                if self.machine.rank == 1:
                    raise ValueError("as it was told")

        rank.CONTENDERS["nccl float32"] = lambda *place: Raises(*place, "float32")
    """
    done = rehearse(tmp_path / "multi_gpu.json", program=broken(tmp_path, code))
    why = "rank 1: ValueError: as it was told"
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"- sizes, all-reduce, 1K, nccl float32: {why}\n" in done.stdout
    for row in json.loads((tmp_path / "multi_gpu.json").read_text())["sizes"]:
        assert row["failures"] == {"nccl float32": why}
        assert set(row["samples"]) == ALL - {"nccl float32"} and set(row["stages"]) == {"float32", "bfloat16"}


def test_contenders_that_end_a_rank_are_left_out_from_then_on(tmp_path):
    """Three of them are one more than a size has attempts to do without; the next size has all that is left."""
    code = """
        def ends(name):
            def make(*place):
                contender = before(*place)
                if contender.machine.rank == 1:
                    contender.run = lambda: os._exit(9)
                return contender

            before, rank.CONTENDERS[name] = rank.CONTENDERS[name], make

        for name in "handle bfloat16", "plain float32", "deepspeed":
            ends(name)
        def stages(here, on, elements, rounds, dtype):
            if dtype == "bfloat16":
                here.gather(at="stages bfloat16")
                os._exit(9)
            return measured(here, on, elements, rounds, dtype)

        measured, rank.stages = rank.stages, stages
        multi_gpu.REHEARSAL_SIZES.append(2**11)
    """
    done = rehearse(tmp_path / "multi_gpu.json", program=broken(tmp_path, code))
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads((tmp_path / "multi_gpu.json").read_text())
    first, third, second = results["sizes"]  # by size
    gone = {"handle bfloat16", "plain float32", "deepspeed"}
    assert first["failed"] and set(first["failures"]) == gone and "samples" not in first
    assert all("rank 1 ended with 9" in why for why in first["failures"].values())
    for row in second, third:
        assert set(row["samples"]) == ALL - gone
        assert set(row["failures"]) == {"stages bfloat16"} and set(row["stages"]) == {"float32"}
    assert third["failures"]["stages bfloat16"] == "left out: they broke the ranks before"


def test_ranks_that_do_not_start_are_told_and_leave_no_samples(tmp_path):
    code = """
        def about(here, on):
            raise ValueError("as it was told")

        rank.about = about
    """
    output = tmp_path / "multi_gpu.json"
    output.write_text("of an earlier run")
    done = rehearse(output, program=broken(tmp_path, code))
    assert done.returncode == 1 and "the ranks did not start" in done.stderr
    assert "rank 0 ValueError: as it was told" in done.stderr.splitlines()[-1]
    assert not output.exists()


class Exchange:
    """torch.distributed for threads."""

    def __init__(self, world):
        self.barrier, self.sent = threading.Barrier(world, timeout=60), [None] * world

    def all_gather(self, rank, rows, tensor):
        self.sent[rank] = tensor.clone()
        self.barrier.wait()
        for row, sent in zip(rows, self.sent):
            row.copy_(sent)
        self.barrier.wait()

    def all_to_all(self, rank, received, tensor):
        world = len(self.sent)
        rows = [torch.empty_like(tensor) for _ in range(world)]
        self.all_gather(rank, rows, tensor)
        received.copy_(torch.cat([row.view(world, -1)[rank] for row in rows]))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_chain_is_deepspeeds_formula(world):
    n, steps = 8 * 6 * 43, 5
    rng = np.random.default_rng(world)
    buffers = rng.standard_normal((steps, world, n)).astype(np.float32)
    exchange, found = Exchange(world), [None] * world

    def run(rank):
        class Ranks:
            all_gather = staticmethod(lambda rows, tensor: exchange.all_gather(rank, rows, tensor))
            all_to_all_single = staticmethod(lambda received, sent: exchange.all_to_all(rank, received, sent))

        chain = deepspeed_worker.AllReduce(
            torch, Ranks, world, n, "cpu", lambda bits: torch.from_numpy(deepspeed_worker.numpy_pack(bits)),
            lambda packed: torch.from_numpy(np.unpackbits(packed.numpy())), lambda: None,
        )  # fmt: skip
        found[rank] = []
        for step in range(steps):
            buffer = torch.from_numpy(buffers[step, rank].copy())
            chain.step(buffer)
            found[rank].append([x.numpy().copy() for x in (buffer, chain.worker_error, chain.server_error)])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers, servers = [np.zeros(n, np.float32)] * world, [np.zeros(n // world, np.float32)] * world
    for step in range(steps):
        out, workers, servers = reference(list(buffers[step]), workers, servers)
        for rank in range(world):
            # torch sums in another order: numbers are close, and so no sign may be close to changing.
            for got, expected in zip(found[rank][step], (out, workers[rank], servers[rank])):
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=f"step {step}, rank {rank}")


def with_peers(times):
    """What a run on two GPUs would have written, of peers that take `times` of NCCL's 100 us, by the number of elements."""
    rows = []
    for elements, factor in times.items():
        samples = {"nccl float32": [[1e-4, 1e-4]] * 2, "handle float32": [[2e-4, 2e-4]] * 2}
        samples |= {"peers float32": [[factor * 1e-4, factor * 1e-4], [factor * 0.9e-4, factor * 0.9e-4]]}
        kernels = {"gc_onebit_encode_f32": [[2e-5, 2e-5]] * 2, "gc_peers_meet": [[1e-6, 1e-6]] * 2}
        found = {"encode": 2 * 10**7, "reduce": 10**6, "decode": 10**6}
        rows.append({
            "kind": "all-reduce", "elements": elements, "calls": 1, "samples": samples, "stages": {}, "failures": {},
            "copy": {"bytes": 2 * 10**9, "seconds": [[1e-3, 1e-3]] * 2},
            "kernels": {"float32": {"samples": kernels, "bytes": found}},
        })  # fmt: skip
    rank = {"card": "A card", "capability": "9.0", "nccl": "2.28", "nvls": "0", "clocks": {}, "library": "0", "torch": "2"}
    about = {"of": "several cards", "world": 2, "on": "cuda", "rehearsal": False, "ranks": [rank] * 2, "driver": "1",
             "commit": "c", "date": "d", "quick": False}  # fmt: skip
    return {"about": about, "sizes": rows, "failed": {}}


def test_peer_memory_has_a_section_and_a_picture_of_its_own(tmp_path):
    results = with_peers({2**10: 2, 2**12: 0.5, 2**14: 1.5, 2**20: 0.5, report.LARGE: 0.4})
    assert report.from_size(results, "peers float32", "nccl float32") == 2**20  # and not 2^12, for 2^14 is slower again
    path, page = tmp_path / "multi_gpu.json", tmp_path / "page.md"
    path.write_text(json.dumps(results))
    subprocess.run([sys.executable, str(ROOT / "bench/report.py"), str(path), "--page", str(page)], check=True)
    text = page.read_text()
    assert "Never slower than NCCL from 1M elements on: float32 from Python." in text
    # 2e7 bytes at 2e12 a second are 10 us, of 20.
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["gc_onebit_encode_f32", "float32", "1K", "20.0", "10.0", "0.500"] in cells
    assert "(performance-peers.svg)" in text
    slow = with_peers({2**10: 2, 2**12: 3})
    assert "at no size to the end" in report.of_peers_and_nccl(slow)


def test_every_codec_has_its_times_and_where_it_begins_to_win(rehearsed):
    results = json.loads(rehearsed[0].read_text())
    times = {2**10: 2, 2**12: 0.5, 2**14: 1.5, 2**16: 0.5, 2**18: 0.4}
    results["codecs"] = [
        {
            "kind": "all codecs", "elements": elements, "host": {"int4 float32 C": 8e-6},
            "samples": {"nccl float32 graph": [[2e-5]] * 2, "int4 float32 graph": [[of * 1e-5], [of * 2e-5]]},
        }
        for elements, of in times.items()
    ]  # fmt: skip
    lines = report.codecs_tables(results).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["float32 in a graph, us", "NCCL", "int4"] in cells
    assert ["4K", "20.0", "10.0 (2.00)"] in cells  # of the slowest rank
    assert ["no slower from", "", "64K"] in cells  # and not 4K, for 16K is slower again
    assert ["int4", "from C", *["8.00"] * 5] in cells
    assert report.codecs_tables({**results, "codecs": []}) is None
    assert report.targets() is None  # for a rehearsal has none
    results["about"]["rehearsal"] = False
    results["codecs"][3]["samples"]["int4 float32 graph"] = [[1.1e-5], [0.9e-5]]  # of 64K elements
    report.codecs_tables(results)
    aims = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.targets().splitlines()]
    assert ["int4 float32 in a graph", "at most 10 us", "-", "64K"] in aims
    assert ["int4 float32 from C", "at most 8 us of the host", "5 sizes", "-"] in aims


def test_a_codec_that_loses_too_much_is_named_and_not_timed(tmp_path):
    code = """
        import multi_gpu_codecs
        multi_gpu_codecs.MOST_LOST["int4"] = 1e-3
    """
    done = rehearse(tmp_path / "multi_gpu.json", "--only", "codecs", program=broken(tmp_path, code))
    assert done.returncode == 1, done.stdout + done.stderr
    for row in json.loads((tmp_path / "multi_gpu.json").read_text())["codecs"]:
        dtypes = "float32", "bfloat16"
        assert set(row["failures"]) == {f"{of} {dtype}" for of in ("int4", "int4 errors") for dtype in dtypes}
        assert all("of the mean is lost" in why for why in row["failures"].values())
        assert any(of.startswith("int8 float32 ") for of in row["samples"])
        assert not any(of.startswith("int4") for of in row["samples"])


def test_two_libraries_stand_beside_each_other(tmp_path):
    another = tmp_path / "another.so"
    another.write_bytes(pathlib.Path(os.environ["GRADCODEC_LIBRARY"]).read_bytes())
    done = rehearse(tmp_path / "multi_gpu.json", "--against", str(another))
    assert done.returncode == 0, done.stdout + done.stderr
    names = {"nccl", *(f"{of}{which}" for of in ("bf16", "int8", "int4") for which in ("", ", against"))}
    results = json.loads((tmp_path / "multi_gpu.json").read_text())
    assert results["sizes"] == [] and "the second named `against`" in done.stdout
    for row in results["codecs"]:
        assert set(row["samples"]) == {f"{name} {dtype} C" for name in names for dtype in ("float32", "bfloat16")}


def test_a_training_step_is_rehearsed_over_gloo(tmp_path):
    output = tmp_path / "training_step.json"
    done = rehearse(output, program=ROOT / "bench/training_step.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A REHEARSAL" in done.stdout
    results = json.loads(output.read_text())
    assert [row["dtype"] for row in results["rows"]] == ["float32", "bfloat16"]
    for row in results["rows"]:
        assert set(row["samples"]) == {"no exchange", "NCCL", "int8, gloo", "int4, gloo"}
        assert all(len(of_ranks) == RANKS for of_ranks in row["samples"].values())
        sent = [row["bytes"][name] for name in ("no exchange", "int4, gloo", "int8, gloo", "NCCL")]
        assert sent[0] == 0 and sent == sorted(set(sent))
