"""What every other folder may use: units, formats, files, locks, processes. Imports no torch, and of Paceline only
`errors`."""

__version__ = "0.1.0"
