"""The report of a synchronous run: records, diagnosis, page."""
