"""What the methods of a kind share."""
