"""Matrix products on a CPU: the op, a block of it, a tile in registers, and what follows a sum."""
