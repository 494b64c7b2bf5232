"""Everything behind the command line. The library never imports it."""
