"""Kernels of multi-LoRA training: one folder for each op, with one public function and several
implementations.

The functions take arrays and tables of chunk owners; they do not depend on models or engines.
"""
