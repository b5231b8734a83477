"""torchrun, but a stopped process is killed after a second or two instead of thirty."""

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.multiprocessing.spawn import ProcessContext

if __name__ == "__main__":
    PContext.close.__defaults__ = (None, 1)
    ProcessContext.join.__defaults__ = (None, 1)  # of processes that were forked
    run.main()
