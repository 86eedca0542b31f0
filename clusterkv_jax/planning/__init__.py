"""What a model, a method and a context take of a topology's chips, before there are any."""
