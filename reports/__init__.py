"""What was found: reports from records alone. Needs no torch."""
