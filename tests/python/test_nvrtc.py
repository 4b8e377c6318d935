"""Tests of NVRTC: its search, its calls, and its failures, with one that compiles nothing
(tests/fakes/nvrtc/libnvrtc.c)."""

import pathlib
import shutil
import textwrap
from ctypes.util import find_library

import pytest

from stand_in import DRIVERS, run

SCRIPT = """
import kernels
from kernels import NO_DISK, Refused, elementwise

fake = None
def library(name="libnvrtc.so.12", mode=0):
    global fake
    fake = ctypes.CDLL(name, mode=mode)
    fake.fake_nvrtc_failed_call.restype = ctypes.c_char_p
    return fake

def prepare(capability=90, flags=NO_DISK, **more):
    kernel = elementwise("float32 x", "float32 y", "y = x", flags=flags, name="twice", **more)
    x = np.zeros(4, "f4")
    try:
        kernel.prepare([x], [x.copy()], capability=capability)
        return kernel.log()
    finally:
        kernel.free()

def refused(status, *words, **how):
    try:
        prepare(**how)
    except Refused as refusal:
        assert refusal.status == status, refusal
        for word in words:
            assert word in refusal.message, (word, refusal.message)
        return refusal.message
    raise AssertionError("not refused")
"""

COMPILING = (
    "nvrtcVersion nvrtcGetNumSupportedArchs nvrtcGetSupportedArchs nvrtcCreateProgram nvrtcCompileProgram "
    "nvrtcGetProgramLogSize nvrtcGetProgramLog nvrtcGetCUBINSize nvrtcGetCUBIN nvrtcDestroyProgram"
)
COMPILE, UNAVAILABLE, OUT_OF_MEMORY, UNSUPPORTED_DEVICE = 26, 25, 10, 3


def named(which):
    """Returns the path of an NVRTC; nothing is searched beside it."""
    return pathlib.Path(DRIVERS) / which / "libnvrtc.so.12"


def with_nvrtc(script, driver="fake_nvrtc", **environment):
    return run(SCRIPT + textwrap.dedent(script), driver=driver, **environment)


def test_every_failed_call_is_reported_and_leaks_nothing():
    names = with_nvrtc(f"""
        library()
        failed = []
        for code in 1, 11:
            for turn in range(100):
                fake.fake_nvrtc_fail_call(turn, code)
                try:
                    prepare(nvrtc=fake._handle)
                except Refused as refusal:
                    name = fake.fake_nvrtc_failed_call().decode()
                    if name == "nvrtcVersion":
                        assert refusal.status == {UNAVAILABLE}, refusal
                    else:
                        assert refusal.status == ({OUT_OF_MEMORY} if code == 1 else {COMPILE}), refusal
                        assert name in refusal.message
                    assert f"({{code}})" in refusal.message
                    assert ("NVRTC_ERROR_OUT_OF_MEMORY" if code == 1 else "an unknown error") in refusal.message
                else:
                    # No status can be returned for a program that was not destroyed.
                    name = fake.fake_nvrtc_failed_call().decode()
                    if not name:
                        break
                    assert name == "nvrtcDestroyProgram"
                assert fake.fake_nvrtc_programs() == 0, name
                failed.append(name)
                fake.fake_nvrtc_fail_call(-1, 0)
                prepare(nvrtc=fake._handle)
        assert len(failed) % 2 == 0 and failed[:len(failed) // 2] == failed[len(failed) // 2:]
        print(*failed[:len(failed) // 2])
        """)
    assert sorted(set(names.split())) == sorted(COMPILING.split())


def test_every_failed_call_for_ptx_is_reported():
    for name in "nvrtcGetPTXSize", "nvrtcGetPTX":
        with_nvrtc(
            f'refused({COMPILE}, "{name}: NVRTC_ERROR_INVALID_INPUT (3)", capability=100); assert library().fake_nvrtc_programs() == 0',
            FAKE_NVRTC_FAILURES=f"{name}=3",
        )


def test_a_compiler_error_is_reported_with_its_text():
    says = '''operation(1): warning #177-D: unused

operation(2): error: identifier "q" is undefined
1 error'''
    with_nvrtc(
        f"""
        kernel = elementwise("float32 x", "float32 y", "y = x", "twice", flags=NO_DISK)
        x = np.zeros(4, "f4")
        try:
            kernel.prepare([x], [x.copy()], capability=90)
        except Refused as refusal:
            assert refusal.status == {COMPILE}
            assert refusal.message == 'twice: operation(2): error: identifier "q" is undefined', refusal
        assert kernel.log() == os.environ["FAKE_NVRTC_SAYS"], kernel.log()
        """,
        FAKE_NVRTC_FAILURES="nvrtcCompileProgram=6",
        FAKE_NVRTC_SAYS=says,
    )


@pytest.mark.parametrize(
    "failures, says, status, words",
    [
        ("nvrtcCompileProgram=6", "", COMPILE, "nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6)"),
        ("nvrtcCompileProgram=5", "nvrtc: error: no option -q", COMPILE, "nvrtc: error: no option -q"),
        ("nvrtcCompileProgram=1", "x: error: memory", OUT_OF_MEMORY, "NVRTC_ERROR_OUT_OF_MEMORY (1)"),
        ("nvrtcCompileProgram=7", "nvrtc: error: failed to open", UNAVAILABLE, "libnvrtc-builtins"),
        ("nvrtcCompileProgram=99", "", COMPILE, "nvrtcCompileProgram: an unknown error (99)"),
        ("nvrtcCompileProgram=6 nvrtcGetProgramLog=11", "x: error: y", COMPILE, "NVRTC_ERROR_COMPILATION (6)"),
        ("nvrtcVersion=3", "", UNAVAILABLE, "nvrtcVersion: NVRTC_ERROR_INVALID_INPUT (3)"),
    ],
)
def test_a_failure_has_the_status_of_its_remedy(failures, says, status, words):
    with_nvrtc(f"refused({status}, {words!r})", FAKE_NVRTC_FAILURES=failures, FAKE_NVRTC_SAYS=says,
               GRADCODEC_NVRTC=named("fake_nvrtc"))  # fmt: skip


@pytest.mark.parametrize("code, stays", [(5, True), (6, True), (2, False), (11, False), (1, False)])
def test_a_failure_that_the_source_did_not_cause_is_retried(code, stays):
    with_nvrtc(
        f"""
        kernel = elementwise("float32 x", "float32 y", "y = x", flags=NO_DISK)
        x = np.zeros(4, "f4")

        def fails():
            try:
                kernel.prepare([x], [x.copy()], capability=90)
            except Refused as refusal:
                return True

        assert fails() and fails() and kernel.log() == os.environ["FAKE_NVRTC_SAYS"]
        del os.environ["FAKE_NVRTC_FAILURES"]
        assert bool(fails()) == {stays}
        """,
        FAKE_NVRTC_FAILURES=f"nvrtcCompileProgram={code}",
        FAKE_NVRTC_SAYS="twice: error: what",
    )


def test_a_failed_source_with_includes_is_compiled_again():
    """Compiles again, but not where no file is read: the source is the same as before."""
    for more, again in [
        ({}, False), (dict(preamble="#include <x>"), True), (dict(options=["-I/x"]), True),
        (dict(options=["--pre-include=x"]), True),
    ]:  # fmt: skip
        with_nvrtc(
            f"""
            kernel = elementwise("float32 x", "float32 y", "y = x", "twice", flags=NO_DISK, **{more!r})
            x = np.zeros(4, "f4")
            for _ in range(2):
                try:
                    kernel.prepare([x], [x.copy()], capability=90)
                except Refused as refusal:
                    assert refusal.status == {COMPILE} and refusal.message == os.environ["FAKE_NVRTC_SAYS"], refusal
                else:
                    raise AssertionError("not refused")
            del os.environ["FAKE_NVRTC_FAILURES"]
            if {again}:
                for _ in range(2):
                    kernel.prepare([x], [x.copy()], capability=90)
            """,
            FAKE_NVRTC_FAILURES="nvrtcCompileProgram=6",
            FAKE_NVRTC_SAYS='twice(1): catastrophic error: cannot open source file "x"',
        )


def test_the_log_has_the_latest_compilation_and_earlier_kernels_stay():
    with_nvrtc("""
        kernel = elementwise("T x", "T y", "y = x", flags=NO_DISK)

        def log_of(dtype, says, fails=0):
            os.environ["FAKE_NVRTC_SAYS"], os.environ["FAKE_NVRTC_FAILURES"] = says, f"nvrtcCompileProgram={fails}" if fails else ""
            x = np.zeros(4, dtype)
            try:
                kernel.prepare([x], [x.copy()], capability=90)
                assert not fails
            except Refused:
                assert fails
            log = ctypes.c_char_p()
            assert lib.gc_kernel_log(kernel.handle, byref(log)) == 0
            assert log.value.decode() == says, (dtype, log.value)
            return ctypes.cast(log, ctypes.c_void_p).value

        logs = [("f4", "", 0), ("f8", "x(1): warning: odd", 0), ("i1", "", 0), ("i2", "x(2): error: odd", 6), ("i4", "", 6),
                ("i8", "x(1): warning: odd", 0), ("u1", "", 1), ("u2", "x(3): error: odd", 1), ("u4", "", 0)]
        found = [(log_of(*how), how[1]) for how in logs]
        assert all(ctypes.string_at(at).decode() == says for at, says in found)
        # Repeats the failure, which must not change the logs.
        same = [log_of("u8", says, 1) for says in ("again", "", "and again")]
        assert same == [log_of("u8", says, 1) for says in ("again", "", "and again")]
        """)


@pytest.mark.parametrize("capability, kind", [(90, b"machine code: "), (75, b"machine code: "), (121, b"PTX: "), (89, b"PTX: ")])
def test_a_gpu_gets_machine_code_or_the_newest_ptx_that_it_supports(tmp_path, capability, kind):
    architecture = {90: "sm_90", 75: "sm_75", 121: "compute_90", 89: "compute_80"}[capability]
    with_nvrtc(f"""
        assert prepare({capability}, flags=0) == ""
        (said,) = kernels.codes()
        assert said.startswith({kind!r}) and b" --gpu-architecture={architecture}" in said, said
        """, GRADCODEC_CACHE_DIR=tmp_path / "cache")


def test_a_gpu_that_nvrtc_no_longer_supports():
    with_nvrtc(f'refused({UNSUPPORTED_DEVICE}, "NVRTC 12", "7.0", "7.5", capability=70)')


def test_warnings_are_in_the_log():
    with_nvrtc("assert prepare() == 'twice(1): warning: odd', prepare()", FAKE_NVRTC_SAYS="twice(1): warning: odd")


@pytest.mark.parametrize("version, words", [("11.1", "NVRTC is of 11.1; 11.2 or later"), ("10.2", "10.2; 11.2 or later")])
def test_an_nvrtc_that_is_too_old_is_refused_with_its_version(version, words):
    with_nvrtc(f"refused({UNAVAILABLE}, {words!r})", FAKE_NVRTC_VERSION=version, GRADCODEC_NVRTC=named("fake_nvrtc"))


@pytest.mark.parametrize("version", ["11.2", "14.0"])
def test_newer_versions_of_nvrtc_are_accepted(version):
    with_nvrtc("prepare()", FAKE_NVRTC_VERSION=version)


def test_a_function_that_is_missing_is_named():
    with_nvrtc(f'refused({UNAVAILABLE}, "NVRTC has no nvrtcGetNumSupportedArchs: 11.2 or later")',
               GRADCODEC_NVRTC=named("old_nvrtc"))  # fmt: skip


def copy_to(folder, name, source="fake_nvrtc"):
    folder.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(shutil.copy(pathlib.Path(DRIVERS) / source / "libnvrtc.so.12", folder / name))


def test_a_handle_precedes_the_environment_and_loaded_libraries(tmp_path):
    """Uses another copy for each case. The failures set in a copy show that it was called."""
    one, two, three = (copy_to(tmp_path / name, "libnvrtc.so.12") for name in "abc")
    with_nvrtc(
        f"""
        def asked(which, **how):
            which.fake_nvrtc_fail_call(0, 3)
            refused({UNAVAILABLE}, "nvrtcVersion: NVRTC_ERROR_INVALID_INPUT (3)", **how)
            which.fake_nvrtc_fail_call(-1, 0)
        loaded = ctypes.CDLL({str(one)!r})
        named = ctypes.CDLL({str(two)!r})
        said = ctypes.CDLL({str(three)!r})
        asked(named, nvrtc=named._handle)
        asked(said)
        del os.environ["GRADCODEC_NVRTC"]
        # The first loaded NVRTC counts. If it gave no answer, the library would use another.
        loaded.fake_nvrtc_fail_call(1, 3)
        refused({COMPILE}, "nvrtcGetNumSupportedArchs: NVRTC_ERROR_INVALID_INPUT (3)")
        """,
        driver="nothing",
        GRADCODEC_NVRTC=three,
    )


def test_an_nvrtc_loaded_under_another_name_is_found(tmp_path):
    odd = copy_to(tmp_path, "libnvrtc-672ee683.so.11.2")
    with_nvrtc(f"library({str(odd)!r}, ctypes.RTLD_LOCAL); fake.fake_nvrtc_fail_call(1, 3); refused({COMPILE}, '(3)')",
               driver="nothing")  # fmt: skip


def test_an_nvrtc_that_is_too_old_does_not_end_the_search(tmp_path):
    old, new = copy_to(tmp_path / "a", "libnvrtc.so.12", "old_nvrtc"), copy_to(tmp_path / "b", "libnvrtc.so.12")
    with_nvrtc(
        f"""
        ctypes.CDLL({str(old)!r})
        library({str(new)!r})
        prepare()
        """,
        driver="nothing",
    )


# The system's NVRTC, if there is one, is found first.
needs_a_bare_machine = pytest.mark.skipif(find_library("nvrtc") is not None, reason="this machine has an NVRTC")
IN_PACKAGES = "cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.so.11.2"


@needs_a_bare_machine
@pytest.mark.parametrize("file", IN_PACKAGES)
def test_an_nvrtc_of_pip_is_found_beside_another_package(tmp_path, file):
    packages = tmp_path / "site-packages"
    nvrtc = packages / "nvidia" / file
    copy_to(nvrtc.parent, nvrtc.name)
    # Any two libraries serve here: one of a package that the process uses, and NVRTC's companion.
    other, builtins = packages / "other.so", nvrtc.parent / "libnvrtc-builtins.so.12.0"
    for library in other, builtins:
        shutil.copy(pathlib.Path(DRIVERS) / "driver" / "libcuda.so.1", library)
    with_nvrtc(
        f"""
        other = ctypes.CDLL({str(other)!r})
        prepare()
        maps = open("/proc/self/maps").read()
        assert {str(nvrtc)!r} in maps and {str(builtins)!r} in maps
        """,
        driver="nothing",
    )


@needs_a_bare_machine
def test_the_error_says_why_the_only_nvrtc_is_unusable(tmp_path):
    old = copy_to(tmp_path, "libnvrtc.so.12", "old_nvrtc")
    with_nvrtc(f'ctypes.CDLL({str(old)!r}); refused({UNAVAILABLE}, "NVRTC has no nvrtcGetNumSupportedArchs")', driver="nothing")


@needs_a_bare_machine
def test_the_error_lists_the_searched_places():
    with_nvrtc(
        f"""
        words = "libnvrtc.so.13, .so.12, .so.11.2", "pip has put none", "1 folders of Python packages", "GRADCODEC_NVRTC may", "pip install nvidia-cuda-nvrtc"
        refused({UNAVAILABLE}, *words)
        """,
        driver="nothing",
    )


def test_an_nvrtc_that_is_named_but_missing(tmp_path):
    with_nvrtc(f'refused({UNAVAILABLE}, "cannot load GRADCODEC_NVRTC", "{tmp_path}/no.so")', driver="nothing",
               GRADCODEC_NVRTC=tmp_path / "no.so")  # fmt: skip
    with_nvrtc(f'refused({UNAVAILABLE}, "GRADCODEC_NVRTC is libnvrtc.so.12: the whole path of a file expected")',
               GRADCODEC_NVRTC="libnvrtc.so.12")  # fmt: skip
