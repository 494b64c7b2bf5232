"""The training behind ``paceline train``: the reference GPT, trained data-parallel on text.

train_settings.py      settings, which are also the command's options
local_sgd_settings.py  settings of ``--every``
auto_strategy.py       ``--strategy auto``: the strategy that fits the measured network
start_training.py      starts the ranks, or joins a launcher's world
train_worker.py        program of each rank
training_job.py        what a rank holds: data, model, optimizer; held-out loss
lr_schedule.py         the learning rate of each step
training_loop.py       the loop
training_progress.py   what rank 0 prints
traffic_counter.py     bytes sent, compared with float32 gradients every step
run_folder.py          files of a run
resume_checks.py       whether a run can be resumed with these settings
"""
