"""What a decoder layer is made of: each block one op, defined in plain XLA, with backends for what takes it faster.

Nothing above this room knows which launches a block takes.
"""
