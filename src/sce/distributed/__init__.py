"""A catalogue over several processes: the sharded item table, its loss, ranking, checkpoints.

`examples/sharded_loop.py` puts them into a training loop.
"""

from sce.distributed.checkpoint import load_sharded, save_sharded
from sce.distributed.loss import ShardedCrossEntropy
from sce.distributed.ranking import ShardedRanker, sharded_top_k
from sce.distributed.ranks import Ranks, start_ranks
from sce.distributed.table import Rows, ShardedTable
from sce.errors import RankError

__all__ = [
    "RankError",
    "Ranks",
    "Rows",
    "ShardedCrossEntropy",
    "ShardedRanker",
    "ShardedTable",
    "load_sharded",
    "save_sharded",
    "sharded_top_k",
    "start_ranks",
]
