"""Puts `paceline.DistributedDataParallel` in the place of torch's class, for programs that can't be edited.

import paceline.ddp

paceline.ddp.install()
runpy.run_path("train.py", run_name="__main__")
"""

from __future__ import annotations

from paceline.parallel.ddp import DistributedDataParallel, install, uninstall

__all__ = ["DistributedDataParallel", "install", "uninstall"]
