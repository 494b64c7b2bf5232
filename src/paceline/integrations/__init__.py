"""Paceline inside other training libraries, one module for each, and loggers of a run's metrics (`loggers`).

The modules are imported by their full names only::

    from paceline.integrations.transformers import PacelineTrainer
    from paceline.integrations.accelerate import PacelineAccelerator
    from paceline.integrations.lightning import PacelineFabricStrategy, PacelineStrategy
"""

from __future__ import annotations
