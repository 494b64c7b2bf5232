"""The authenticated key-value store of ranks on several hosts, and the server and connections that it uses."""
