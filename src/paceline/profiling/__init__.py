"""Recording a run for `paceline report`: each rank's timeline on one clock, the numbers of its steps, what ran.

profiler.py        `Profiler`, around the user's loop; ``run.json``
rank_timeline.py   one rank's timeline
step_recorder.py   gathers a step and writes it as one line
trace_file.py      the file of these lines
clock_sync.py      offsets between the clocks of hosts
metrics_writer.py  losses and other numbers per step, ``steps.jsonl``
run_loggers.py     passes the same numbers to loggers
"""
