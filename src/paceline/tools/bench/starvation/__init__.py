"""Starvation, shown: real ranks with unequal numbers of batches, under torch and under Paceline.

scenes.py    what the rank that runs dry does, and who trains
setup.py     who has how many batches, and which samples are in them
notes.py     what a rank writes while it goes on, so that a crash loses nothing of it
outcome.py   what became of each rank, and of the scene
task.py      what is trained, and what one process finds
trainers.py  one training step under torch DDP, FSDP2 and Paceline
rank.py      the part of one rank in a scene
stage.py     the program that forks the ranks of each scene and sees how they end
measure.py   has it play the scenes; the result for JSON
table.py     the result as rows of words
"""
