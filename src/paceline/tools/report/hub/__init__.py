"""The report of an asynchronous run: ledger, statistics, page."""
