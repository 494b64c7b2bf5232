"""What lets hub and workers outlive their own death: the hub's journal, and a worker's outbox.

What the hub decides is on the disk before anybody is told of it (`journal`), and what a worker offers stays in its
outbox until the hub has said that it is safe (`outbox`). So after a crash of either, or of both, everything that was
acknowledged is there, and what was not is offered again.

journal.py     what a hub decided: records, snapshots, a ledger for readers; memory.py: the same without a disk
recovery.py    what an heir finds: where records begin and end, what was torn and what is damaged
records.py     the format of a record; plain.py: of its values; logfile.py, reading.py: a file of them
snapshot.py    the numbers of a centre, with their checksum
ledger.py      a line for each record, for people and reports
outbox.py      what a worker offers until it is acknowledged; letters.py: the files
folder.py, page.py, lock.py, disk.py   names of files, a small checked page, one owner at a time, a full disk
"""
