"""``python -m paceline`` is ``paceline``."""

from paceline.tools.cli.app import main

if __name__ == "__main__":
    main()
