"""Attention and recurrence over the arena. ``reference`` is the readable form that fast kernels are held against."""
