"""Averages a gradient over the ranks of MPI at 8 bits per element, by mpi4py.

    mpiexec -n 4 python3 examples/python/mpi_allreduce.py
"""

import numpy as np
from mpi4py import MPI

import gradcodec

world = MPI.COMM_WORLD
gradient = np.random.default_rng(world.rank).standard_normal(100_000, np.float32)
exact = world.allreduce(gradient) / world.size

comm = gradcodec.GradCodec().communicator(world.rank, world.size, world.Alltoall, world.Allgather)
with comm.allreduce("int8", [gradient.size], error="none") as allreduce:
    allreduce.run([gradient])  # every rank now has the mean, with the same bytes
    off, sent = np.abs(gradient - exact).max(), allreduce.sent_bytes
assert off < 0.03
if world.rank == 0:
    print(f"{world.size} ranks: off by {off:.3f} at most, {sent:,} bytes sent by each")
