"""Other drafters, trained on the same answers and run in the same loop: what the head is measured against."""
