"""What a model's keys look like, and what methods find in them."""
