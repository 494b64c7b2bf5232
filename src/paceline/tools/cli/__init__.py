"""The command line: one file per command, none loaded before it is used."""
