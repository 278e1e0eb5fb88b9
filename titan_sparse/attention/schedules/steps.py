"""What some query heads compute in the steps of a schedule: the sums of a forward and of a backward.

The gathered verticals are dealt out over the steps, block by block. The first step of a forward and
the last one of a backward get none, so that work hides their exchanges.
"""

from collections.abc import Callable

from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Partial, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.schedule import vertical_shares
from titan_sparse.attention.merge import at_last
from titan_sparse.attention.schedules import rectangles, verticals
from titan_sparse.attention.schedules.rectangles import Rectangle
from titan_sparse.kernels.block_sparse import Piece, Tiles

MakeTiles = Callable[[bool], Tiles]
"""Makes the tiles of a step; the argument says whether with Tiles.by_key."""


class ForwardSum:
    """Attention summed over the steps, in fp32 (fp64 for fp64), because errors of rounding at every
    step would add up. Only the last step rounds.
    """

    def __init__(
        self,
        call: AttentionCall,
        q: Tensor,
        steps: int,
        into: Tensor | None,
        gathered: Pending,
        heads: slice = slice(None),
    ):
        """call, q: of the query heads `heads`. steps: how many this rank computes. into: memory for
        the result. gathered: keys and values of the verticals of all heads, on their way.
        """
        self.call = call
        self.q = q
        self.places = at_last(steps, into)
        self.gathered = gathered
        self.heads = heads
        self.shares = vertical_shares(steps, gathered.result.shape[3] // call.cp.block_size)
        # The last steps meet the verticals.
        self.share = self.shares - steps
        self.total: Partial | None = None

    def add(
        self, k: Tensor, v: Tensor, make_tiles: MakeTiles, rectangle: Rectangle | None = None
    ) -> None:
        """Compute the next step. rectangle: what takes the place of tiles, if there is one."""
        call = self.call
        dtype = call.sum_dtype(self.q)
        into = next(self.places)
        if self.share >= 0:
            self.gathered.wait()
        with recorder.computing():
            if rectangle is not None:
                self.total = rectangles.forward(
                    call, rectangle, self.q, k, v, self.total, dtype, into
                )
            else:
                pieces = [Piece(k, v, make_tiles(False))]
                if self.share >= 0:
                    vertical_kv = self.gathered.result[:, :, self.heads]
                    piece = call_tiles.vertical_piece(
                        call, vertical_kv, len(k), False, self.share, self.shares
                    )
                    pieces.append(piece)
                self.total = call.backend.forward(
                    self.q, pieces, self.total, call.scale, dtype, into
                )
        self.share += 1


class BackwardSum:
    """Gradients of the queries summed over the steps; those of keys are each step's own."""

    def __init__(
        self,
        call: AttentionCall,
        queries: Queries,
        steps: int,
        into: Tensor | None,
        d_verticals: verticals.Gradients,
        heads: slice = slice(None),
    ):
        """d_verticals: receives the verticals' gradients. The others: as in ForwardSum."""
        self.call = call
        self.queries = Queries._make(tensor[:, heads] for tensor in queries)
        self.places = at_last(steps, into)
        self.d_verticals = d_verticals
        self.heads = heads
        vertical_kv = d_verticals.vertical_kv
        self.shares = vertical_shares(steps, vertical_kv.shape[3] // call.cp.block_size)
        # The first steps meet the verticals.
        self.share = 0
        self.dq: Tensor | None = None
        d_verticals.missing += self.shares

    def add(
        self, k: Tensor, v: Tensor, make_tiles: MakeTiles, rectangle: Rectangle | None = None
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of the next step."""
        call = self.call
        dtype = call.sum_dtype(k)
        into = next(self.places)
        if rectangle is not None:
            self.dq, dk, dv = rectangles.backward(
                call, rectangle, self.queries, k, v, self.dq, dtype, into
            )
            return dk, dv
        by_key = call.backend.READS_BY_KEY
        pieces = [Piece(k, v, make_tiles(by_key))]
        has_verticals = self.share < self.shares
        if has_verticals:
            vertical_kv = self.d_verticals.vertical_kv[:, :, self.heads]
            piece = call_tiles.vertical_piece(
                call, vertical_kv, len(k), by_key, self.share, self.shares
            )
            pieces.append(piece)
        self.dq, gradients = call.backend.backward(
            self.queries, pieces, self.dq, call.scale, dtype, into
        )
        if has_verticals:
            self.d_verticals.put(gradients[1], self.heads, self.share, self.shares)
            self.share += 1
        return gradients[0]
