"""Places that hold the checkpoints of a run: folders, and object stores."""
