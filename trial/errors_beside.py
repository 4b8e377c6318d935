"""Throw-away: all-reduces with errors of two libraries, in turn: errors_beside.py NEW OLD [SECONDS]"""
import os, pathlib, statistics, sys, time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
os.environ.setdefault("GRADCODEC_LIBRARY", os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else "")
os.environ["NCCL_NVLS_ENABLE"] = "0"
sys.path[:0] = [str(HERE), *(str(ROOT / "tests" / folder) for folder in ("multi_gpu", "python"))]
sys.path.append(str(ROOT / "python"))


def measure(here, on, elements, rounds, dtype, paths, most):
    import multi_gpu_codecs as codecs

    codecs.CODECS = [one for one in codecs.CODECS if one[2]]
    whole = codecs.of_dtype
    codecs.of_dtype = lambda machine, dtype, libraries, has_all, _: whole(machine, dtype, libraries, True, False)
    codecs.is_timed = lambda key, left_out: False
    try:
        return codecs.measure(here, on, elements, rounds, dtype, paths, most, True, [])
    finally:
        codecs.of_dtype = whole


def main():
    from ranks import Ranks

    begin, seconds = time.monotonic(), float(sys.argv[3]) if len(sys.argv) > 3 else 90
    on, world = ("cpu", 2) if os.environ.get("ON") == "cpu" else ("cuda", 2)
    sizes = [2**10, 2**12] if on == "cpu" else [2**16, 2**20, 2**12, 2**18, 2**14]
    paths = [os.path.abspath(path) for path in sys.argv[1:3]]
    ranks = Ranks(world)
    for elements in sizes:
        for dtype in ("float32", "bfloat16"):
            if time.monotonic() - begin > seconds:
                print(f"no time for {elements} {dtype}")
                continue
            found = ranks.call(measure, on, elements, 3 if on == "cpu" else 21, dtype, paths, max(sizes), seconds=120)
            for name, why in found[0]["failures"].items():
                print("FAILED", elements, name, why)
            for key in found[0]["seconds"]:
                of_rounds = [max(each) for each in zip(*(one["seconds"][key] for one in found))]
                print(f"{elements:9} {key:40} {statistics.median(of_rounds) * 1e6:8.1f} us  (least {min(of_rounds) * 1e6:.1f})",
                      flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
