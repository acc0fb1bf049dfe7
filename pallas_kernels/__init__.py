"""Grouped-LoRA kernels: one folder per op, each with one interface and several implementations.

Nothing in here knows of models, tasks or engines: the functions take arrays and routing tables.
"""
