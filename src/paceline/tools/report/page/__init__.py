"""Layout of a report page: HTML, style, and the scripts of its charts."""
