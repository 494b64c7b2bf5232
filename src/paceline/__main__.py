"""Runs the command line as ``python -m paceline``."""

from paceline.tools.cli.app import main

if __name__ == "__main__":
    main()
