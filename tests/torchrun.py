"""torchrun, but a stopped process is killed after one second instead of thirty."""

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

if __name__ == "__main__":
    PContext.close.__defaults__ = (None, 1)
    run.main()
