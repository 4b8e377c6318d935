"""docs/NUMERICS.md 12 in NumPy: the hierarchical all-reduce, to the last bit. Plain and slow.

The model of a world has all its ranks, and exchanges in Python. `world_model` makes it: a `NodesModel`, or a `FlatModel`
where there is one node, or one rank per node. Step 3 is computed by the models of sections 4 to 11.
"""

import numpy as np

from block_model import SUM, model_of, to_16
from codec_model import CORRUPT, NONFINITE, ZERO, canonical, f32, narrow, widen

HEADER = 64


def world_model(nodes, ranks, **options):
    """Returns the model of a world. `options`: options of a model, without chunks."""
    if nodes == 1 or ranks == 1:
        return FlatModel(nodes * ranks, **options)
    return NodesModel(nodes, ranks, **options)


def total_of(rows):
    """Returns fl(...fl(fl(+0 + row 0) + row 1)...)."""
    total = np.zeros(rows.shape[1], f32)
    with np.errstate(all="ignore"):
        for row in rows:
            total = total + row
    return total


def mean_of(rows):
    """Returns total_of() of the rows, each divided by their number."""
    with np.errstate(all="ignore"):
        return total_of(rows / f32(len(rows)))


class FlatModel:
    """W ranks of one level, with a model each. `sent`: bytes of the last call's exchanges, by name and rank."""

    def __init__(self, size, **options):
        self.size, self.sent, self.on_cuda = size, {}, False
        self.models = [model_of(**options, n_chunks=size, server=rank) for rank in range(size)]

    def factors(self, given):
        """Returns each rank's factor. `given`: one for all, or a list with one for each; None is 1."""
        each = given if isinstance(given, list) else [given] * self.size
        return [1.0 if factor is None else factor for factor in each]

    def encoded(self, gradients, value_factors, error_factors):
        """Returns the chunks that each rank reduces, one of each payload."""
        both = zip(self.factors(value_factors), self.factors(error_factors))
        payloads = [m.encode(g, *f).reshape(self.size, -1) for m, g, f in zip(self.models, gradients, both)]
        self.sent = {"encoded": payloads}
        return [np.stack([payload[rank] for payload in payloads]) for rank in range(self.size)]

    def finished(self, reduced):
        """Returns the values of each rank, from the chunks that ranks have reduced. None: the call fails as CORRUPT."""
        self.sent["reduced"] = reduced
        return [model.decode(np.concatenate(reduced), model.values, on_cuda=self.on_cuda) for model in self.models]

    def run(self, gradients, value_factors=None, error_factors=None):
        """Returns the new values for gradients, [rank][segment], in memory's dtype."""
        chunks = self.encoded(gradients, value_factors, error_factors)
        return self.finished([model.reduce(mine) for model, mine in zip(self.models, chunks)])

    def reduce_scatter(self, gradients, value_factors=None, error_factors=None):
        """Returns the shard of each rank. None: the call fails as CORRUPT."""
        chunks = self.encoded(gradients, value_factors, error_factors)
        return [model.mean(mine, self.on_cuda) for model, mine in zip(self.models, chunks)]

    def all_gather(self, shards):
        self.sent = {}
        return self.finished([model.encode_shard(one) for model, one in zip(self.models, shards)])

    def errors_in(self, workers, server):
        """Sets rows of the worker errors of any world, and the server errors of all elements; None: not these."""
        for rank in range(self.size):
            self.errors_of_rank_in(rank, workers, server)

    def errors_of_rank_in(self, rank, workers, server):
        model = self.models[rank]
        if server is not None:
            model.take_errors(1, server[model.shard_places()])
        if workers is not None:
            model.take_errors(0, self.of_rows(workers, rank))

    def of_rows(self, rows, rank):
        if len(rows) == self.size:
            return rows[rank]
        return over_nodes(rows, self.size) if is_sum(self.models[0]) else mean_of(rows)


def is_sum(model):
    return model.reduction == SUM


def over_nodes(rows, count):
    """Returns the sum of the rows of another world, divided by the number of ranks that add it."""
    with np.errstate(all="ignore"):
        return total_of(rows) / f32(count)


class RankModel:
    """Rank `number` of node `node`: the commit, flags, errors and shards of a handle, and the steps of section 12."""

    def __init__(self, nodes, ranks, node, number, options):
        self.nodes, self.ranks, self.node, self.number = nodes, ranks, node, number
        self.whole = model_of(**options, n_chunks=ranks)
        self.values, self.segments = self.whole.values, self.whole.segments
        # Pieces of each part, as slices of the segments.
        self.parts = [
            [self.whole.part(segment, part) or slice(0, 0) for segment in range(len(self.segments))] for part in range(ranks)
        ]  # fmt: skip
        of_step_3 = {**options, "values": "float32", "n_chunks": nodes, "ranks": nodes * ranks}
        self.layouts = [model_of(**{**of_step_3, "segments": self.sizes(part)}) for part in range(ranks)]
        self.step_3 = model_of(**{**of_step_3, "segments": self.sizes(number), "server": node})
        self.block_bytes = to_16(HEADER + max(map(self.value_bytes, range(ranks))))
        self.gathered_bytes = nodes * self.layouts[0].stride

    def sizes(self, part):
        return [piece.stop - piece.start for piece in self.parts[part]]

    def value_bytes(self, part):
        return sum(self.sizes(part)) * self.dtype.itemsize

    @property
    def dtype(self):
        """Returns the dtype of values in memory."""
        return narrow(f32([0]), self.values).dtype

    # --- a handle ---

    nonfinite = property(lambda self: self.step_3.nonfinite)
    pending = property(lambda self: self.step_3.pending)
    flags = property(lambda self: self.step_3.flags, lambda self, flags: setattr(self.step_3, "flags", flags))

    def commit(self, skip=False):
        self.step_3.commit(skip)

    def reset(self):
        self.step_3.reset()

    def worker_places(self):
        """Returns the places of the elements of this rank's part among those of all segments."""
        firsts = np.concatenate([[0], np.cumsum(self.segments)]).astype(int)
        each = [np.arange(piece.start, piece.stop) + first for piece, first in zip(self.parts[self.number], firsts)]
        return np.concatenate([np.zeros(0, int), *each])

    def shard_elements(self):
        return self.step_3.shard_elements()

    def shard_places(self):
        return self.worker_places()[self.step_3.shard_places()]

    def errors(self, which):
        """Returns the worker's errors (0), a row of all elements, or the shard's (1)."""
        if which == 1:
            return self.step_3.errors(1)
        row = np.zeros(sum(self.segments), f32)
        row[self.worker_places()] = self.step_3.errors(0)
        return row

    def take_errors(self, which, errors):
        """Sets the errors of the part (0) or of the shard (1)."""
        self.step_3.take_errors(which, errors)

    def of_rows(self, rows):
        rows = rows[:, self.worker_places()]
        if len(rows) == 1:
            return rows[0]
        with np.errstate(all="ignore"):
            if len(rows) == self.nodes * self.ranks:
                own = rows[self.node * self.ranks :][: self.ranks]
                total = own[0]
                for row in own[1:]:
                    total = total + row
                return total
            return over_nodes(rows, self.nodes) if is_sum(self.step_3) else f32(self.ranks) * mean_of(rows)

    # --- the steps ---

    def header(self, part, factor):
        """Returns the header of a block of step 1."""
        layout = self.layouts[part]
        header = bytearray(layout.header(part, magic=b"GCPV"))
        header[8] = self.whole.header(0)[8]
        header[16:20] = np.uint32(self.ranks).tobytes()
        header[40:48] = np.int64(self.value_bytes(part)).tobytes()
        header[56:60] = f32(factor).tobytes()
        return bytes(header)

    def blocks(self, gradients, factor):
        """Returns the blocks of step 1 for the ranks of the node."""
        found = []
        for part, pieces in enumerate(self.parts):
            values = b"".join(np.ascontiguousarray(g[piece]).tobytes() for g, piece in zip(gradients, pieces))
            found.append((self.header(part, factor) + values).ljust(self.block_bytes, b"\0"))
        return found

    def encode(self, blocks, error_factor):
        """Makes the payload for other nodes from the blocks of this node's ranks: step 2, and step 3's encoding."""
        sizes = self.sizes(self.number)
        u, met = None, 0
        for block in blocks:
            g = widen(np.frombuffer(block, self.dtype, sum(sizes), HEADER), self.values)
            with np.errstate(all="ignore"):
                g, found = self.counted(g)
                v, found_too = self.counted(np.frombuffer(block, f32, 1, 56)[0] * g)
                met |= found | found_too
                u = v if u is None else u + v
        if any(self.is_corrupt(block) for block in blocks):
            u, met = np.zeros_like(u), CORRUPT
        u = np.split(canonical(u), np.cumsum(sizes)[:-1]) if sizes else []
        return self.step_3.encode(u, 1.0, error_factor, met)

    def counted(self, x):
        """Returns x, where under the policy ZERO +0 replaces what is not finite, and the flags for that."""
        wrong = ~np.isfinite(x)
        if self.nonfinite != ZERO or not wrong.any():
            return x, 0
        return np.where(wrong, f32(0), x), NONFINITE

    def is_corrupt(self, block):
        expected = self.header(self.number, 1.0)
        return (block[:56], block[60:64]) != (expected[:56], expected[60:64])

    def reduce(self, chunks):
        return self.step_3.reduce(chunks)

    def mean(self, chunks, on_cuda):
        return self.step_3.mean(chunks, on_cuda)

    def encode_shard(self, shard):
        return self.step_3.encode_shard(shard)

    def decode(self, gathered, on_cuda):
        """Returns step 4's values from the reduced chunks of each part: one array a segment, in memory's dtype. Except
        on CUDA, None if a chunk is corrupt."""
        of_parts = list(zip(self.layouts, self.parts, gathered))
        if not on_cuda and any(layout.is_corrupt(c, k) for layout, _, chunks in of_parts for k, c in enumerate(chunks)):
            self.step_3.note(CORRUPT)
            return None
        out = [np.zeros(n, self.dtype) for n in self.segments]
        for layout, pieces, chunks in of_parts:
            layout.flags = 0
            for values, piece, found in zip(out, pieces, layout.decode(np.concatenate(chunks), self.values, on_cuda=on_cuda)):
                values[piece] = found
            self.step_3.note(layout.flags)
        return out


class NodesModel(FlatModel):
    """N nodes of R ranks, N and R at least 2. `before`: a function of a step's name, the sender, the receiver and the
    bytes, which returns the bytes that arrive. Steps are "values", "encoded", "reduced" and "gathered"."""

    def __init__(self, nodes, ranks, **options):
        self.nodes, self.ranks, self.size, self.sent, self.on_cuda = nodes, ranks, nodes * ranks, {}, False
        self.models = [RankModel(nodes, ranks, *divmod(rank, ranks), options) for rank in range(self.size)]
        self.before = lambda step, sender, receiver, data: data

    def on_node(self, rank):
        """Returns the ranks of a rank's node."""
        first = rank // self.ranks * self.ranks
        return range(first, first + self.ranks)

    def across(self, rank):
        """Returns the ranks with a rank's number, on all nodes."""
        return range(rank % self.ranks, self.size, self.ranks)

    def arrived(self, step, senders, receiver, what):
        """Returns `what(sender)` of all senders in order. `before` changes all but the receiver's own bytes."""
        each = [(sender, np.frombuffer(what(sender), np.uint8)) for sender in senders]
        return [
            data if sender == receiver else np.frombuffer(self.before(step, sender, receiver, data.tobytes()), np.uint8)
            for sender, data in each
        ]

    def encoded(self, gradients, value_factors, error_factors):
        factors = self.factors(value_factors), self.factors(error_factors)
        blocks = [model.blocks(g, m) for model, g, m in zip(self.models, gradients, factors[0])]
        payloads = []
        for rank, model in enumerate(self.models):
            found = self.arrived("values", self.on_node(rank), rank, lambda j: blocks[j][model.number])
            payload = model.encode([block.tobytes() for block in found], factors[1][rank])
            payloads.append(payload.reshape(self.nodes, -1))
        self.sent = {"values": blocks, "encoded": payloads}
        return [
            np.stack(self.arrived("encoded", self.across(rank), rank, lambda other: payloads[other][model.node]))
            for rank, model in enumerate(self.models)
        ]

    def finished(self, reduced):
        self.sent["reduced"] = reduced
        # `own`: each rank's chunks of its part, in the order of nodes.
        own = [
            np.stack(self.arrived("reduced", self.across(rank), rank, lambda other: reduced[other]))
            for rank in range(self.size)
        ]
        found = []
        for rank, model in enumerate(self.models):
            parts = self.arrived("gathered", self.on_node(rank), rank, lambda other: own[other].reshape(-1))
            found.append(model.decode([part.reshape(self.nodes, -1) for part in parts], self.on_cuda))
        return found

    def of_rows(self, rows, rank):
        return self.models[rank].of_rows(rows)
