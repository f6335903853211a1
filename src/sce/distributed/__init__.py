"""A catalogue over several processes: the sharded item table, its loss, ranking, checkpoints.

`examples/sharded_loop.py` puts them into a training loop.
"""

from sce.distributed.checkpoint import load_sharded as load_sharded
from sce.distributed.checkpoint import save_sharded as save_sharded
from sce.distributed.loss import ShardedCrossEntropy as ShardedCrossEntropy
from sce.distributed.ranking import ShardedRanker as ShardedRanker
from sce.distributed.ranking import sharded_top_k as sharded_top_k
from sce.distributed.ranks import Ranks as Ranks
from sce.distributed.ranks import start_ranks as start_ranks
from sce.distributed.table import Rows as Rows
from sce.distributed.table import ShardedTable as ShardedTable
from sce.errors import RankError as RankError
