"""Kernels of multi-LoRA training: one folder for each op, with one public function and several
implementations.

The functions take arrays and tables of chunk owners. They know nothing of models, tasks or engines.
"""
