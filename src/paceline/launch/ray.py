"""Ray: a driver program that runs a training on a Ray cluster (pure; the one that talks to Ray is `on_ray`).

Ray reserves room for all hosts at once (a placement group) and keeps a small actor on each; the actor runs
``paceline run``, and that the ranks. A rank that fails is started again with its fellows by `paceline run`, an actor or
a machine that is lost by Ray.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from paceline.launch.work import Work

__all__ = ["ray_driver", "work_from_json"]


def ray_driver(work: Work) -> str:
    """Return the text of a Python program that runs `work` on the Ray cluster where it is started.

    It joins the cluster that it runs in (``ray job submit`` too), or the one that RAY_ADDRESS names; else it makes one
    of this machine.

    Example:
        >>> "run_on_ray" in ray_driver(Work(("train.py",)))
        True
    """
    text = json.dumps(asdict(work))
    return (
        f'"""Run {work.name} on a Ray cluster: python THIS_FILE, or ray job submit -- python THIS_FILE."""\n\n'
        "import sys\n\n"
        "from paceline.launch.on_ray import run_on_ray\n"
        "from paceline.launch.ray import work_from_json\n\n"
        f"WORK = {text!r}\n\n"
        'if __name__ == "__main__":\n'
        "    sys.exit(run_on_ray(work_from_json(WORK)))\n"
    )


def work_from_json(text: str) -> Work:
    """Return the work that a driver carries."""
    told = json.loads(text)
    for name in ("program", "host_names"):
        told[name] = tuple(told[name])
    return Work(**told)
