"""Elastic training without a restart: members of a world die, leave and join, and the others train on.

view.py             views, reports and plans of recovery: the data
next_view.py        the rules: from the reports of a view's members to the next view
member.py           state machine of one member
member_events.py    its events and actions
store_records.py    keys and values in the store of the job
store_link.py       reads and writes them; a store whose waits can be ended
membership.py       runs the state machine in a thread
training_state.py   what members bring to the same values
shard_recovery.py   copies of the neighbours' shards, and what is built from them
world_forming.py    connects the members of a view and brings them to the same state
step_counter.py     counts steps, and failures between them
live_checkpoint.py  saves between steps, and before the last ranks leave
live_training.py    `paceline.Elastic`: attempts at steps
"""
