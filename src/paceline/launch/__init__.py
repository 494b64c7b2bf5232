"""Starting the ranks of a world."""
