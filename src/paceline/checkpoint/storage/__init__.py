"""Places that hold the checkpoints of a run.

checkpoint_store.py   what the rest of `checkpoint` needs of one
local_folder.py       a folder that all ranks share
stores.py             the place, or the single checkpoint, that a path or URL names
remote_folder.py      a remote file system: object stores, SFTP
remote_attempt.py     a checkpoint that is being written there
remote_files.py       the files of one, read in blocks
run_ownership.py      one run at a time, without locks
file_system.py        calls through fsspec, repeated while it is down
store_errors.py       errors of file systems: which may pass
paced_upload.py       uploads at a limited rate
host_cache.py         files on a disk of this host, shared by its ranks
"""
