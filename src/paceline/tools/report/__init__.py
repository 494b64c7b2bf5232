"""What a run did, for people: records read from its folder, their numbers, charts and one HTML page."""
