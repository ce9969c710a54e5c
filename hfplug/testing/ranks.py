"""Running a test's script on several gloo ranks of this machine, as ``torchrun`` does.

Each rank runs the script through this module, which ends it in order: all ranks meet, the process group goes, and the
interpreter is not finalised. A library's thread that is still alive then can abort the process (``SIGABRT``), and
``torchrun`` stops every other rank for it: a training that went well would be reported as one that failed.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import subprocess
import sys
from pathlib import Path


def run_ranks(script: str | Path, *args: str, ranks: int = 2, timeout: float = 170.0) -> None:
    """Run a Python file on ``ranks`` processes, one torch thread each; with one rank there is no process group.

    Args:
        script: runs as ``__main__``; under several ranks it, or its ``Trainer``, makes the process group.
        args: its command line.
        ranks: number of processes.
        timeout: seconds.

    Raises:
        AssertionError: a rank failed, with all that the ranks wrote.
        subprocess.TimeoutExpired: it took longer than ``timeout``.
    """
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *several, "-m", __name__, str(script), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, timeout=timeout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit status {done.returncode} on {ranks} ranks:\n{done.stdout}\n{done.stderr}"


def main() -> None:
    """One rank: the script of the command line, then an orderly end."""
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    group = torch.distributed
    if group.is_initialized():
        group.barrier()
        group.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
