"""What every other folder may use: units, files, locks, hashing, processes. No torch, and nothing of Paceline but
errors."""
