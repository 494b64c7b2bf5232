"""State that survives a crash: the hub's write-ahead log, and a worker's outbox.

A decision of the hub is on disk before anything is answered, and an update stays in its worker's outbox until the hub
has acknowledged it. So after a crash of either, or of both, everything acknowledged is there, and the rest is sent
again.

hub_journal.py       the hub's decisions: records, snapshots, ledger
memory_journal.py    the same without a disk
journal_recovery.py  finds snapshot and end of the records; distinguishes torn from damaged records
journal_records.py   format of a record
journal_file.py      a file of records
hub_snapshot.py      tensors and facts, with a checksum
decision_ledger.py   one JSON line per record, for people and reports
hub_folder.py        names of the hub's files
hub_term.py          how often a standby took over; mark of a standby's copy
worker_outbox.py     updates until they are acknowledged
durable_files.py     appending to files, folders, small files with a checksum
"""
