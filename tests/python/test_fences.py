"""Non-temporal stores are not ordered with other stores: a function that makes them must end with a fence, or another
thread that gets the result may still read the old bytes. No run shows that reliably, but the machine code does."""

import os
import platform
import re
import subprocess

import pytest


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has these instructions")
def test_stores_past_the_caches_are_followed_by_a_fence():
    command = ["objdump", "-d", "--no-show-raw-insn", os.environ["GRADCODEC_LIBRARY"]]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    streaming, without = 0, []
    for function in re.split(r"\n(?=[0-9a-f]+ <)", text):
        stores = [found.start() for found in re.finditer(r"\tv?movnt(?:i|q|dq|pd|ps)\b", function)]
        if stores:
            streaming += 1
            if function.rfind("\tsfence") < stores[-1]:
                without.append(function.split("\n")[0])
    assert streaming and not without
